#include <cstdlib>
#include <filesystem>
#include <vector>

#include "router/text/detokenizer.h"
#include "tests/golden.h"
#include "tests/router/text/text_testing.h"

namespace weft {
namespace {

constexpr char kSmolLm2[] = WEFT_SOURCE_DIR "/models/smollm2-135m-instruct/tokenizer.json";

// Ends the test when `path`, which a script makes, is not there.
#define MODEL_OR_SKIP(path, script)                                                      \
  if (!std::filesystem::exists(path)) {                                                  \
    if (std::getenv("CI") != nullptr) FAIL() << (path) << " is missing: run " << script; \
    GTEST_SKIP() << (path) << " is missing: run " << script;                             \
  }

std::unique_ptr<Tokenizer> MustLoad(const std::string& path) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(path);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

std::vector<std::int32_t> MustEncode(const Tokenizer& tokenizer, const std::string& text) {
  absl::StatusOr<std::vector<std::int32_t>> ids = tokenizer.Encode(text, false);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *std::move(ids) : std::vector<std::int32_t>();
}

// One id a call, as a stream gets them.
std::string DetokenizeInSteps(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
  Detokenizer detokenizer(tokenizer);
  std::string text;
  for (const std::int32_t id : ids) text += detokenizer.Append({&id, 1});
  return text + detokenizer.Finish();
}

void CheckTexts(const Tokenizer& tokenizer, const nlohmann::json& golden) {
  EXPECT_EQ(tokenizer.vocab_size(), golden["vocab_size"].get<int>());
  ASSERT_FALSE(golden["texts"].empty());
  for (const nlohmann::json& entry : golden["texts"]) {
    const auto text = entry["text"].get<std::string>();
    const auto ids = entry["ids"].get<std::vector<std::int32_t>>();
    EXPECT_EQ(MustEncode(tokenizer, text), ids) << text;
    const auto decoded = entry["decoded"].get<std::string>();
    EXPECT_EQ(Detokenize(tokenizer, ids, false), decoded);
    const std::string shown = entry.value("decoded_skip_special", decoded);
    EXPECT_EQ(Detokenize(tokenizer, ids, true), shown);
    EXPECT_EQ(DetokenizeInSteps(tokenizer, ids), shown);
  }
}

TEST(TokenizerGoldenTest, SmolLm2TextsHaveNoDifference) {
  WEFT_GOLDEN_OR_SKIP(path, "tokenizers/smollm2.json");
  MODEL_OR_SKIP(kSmolLm2, "scripts/fetch_model.sh");
  const std::unique_ptr<Tokenizer> tokenizer = MustLoad(kSmolLm2);
  ASSERT_NE(tokenizer, nullptr);
  CheckTexts(*tokenizer, ReadJson(path));
}

TEST(TokenizerGoldenTest, SmolLm2PromptsAndAnswersAreThoseOfTheReference) {
  WEFT_GOLDEN_OR_SKIP(path, "smollm2.json");
  MODEL_OR_SKIP(kSmolLm2, "scripts/fetch_model.sh");
  const std::unique_ptr<Tokenizer> tokenizer = MustLoad(kSmolLm2);
  ASSERT_NE(tokenizer, nullptr);
  const nlohmann::json golden = ReadJson(path);
  ASSERT_FALSE(golden["prompts"].empty());
  for (const nlohmann::json& prompt : golden["prompts"]) {
    EXPECT_EQ(nlohmann::json(MustEncode(*tokenizer, prompt["text"])), prompt["ids"]);
    for (const char* weights : {"fp32", "bf16"}) {
      if (!prompt.contains(weights) || !prompt[weights].contains("text")) continue;
      const auto greedy = prompt[weights]["greedy"].get<std::vector<std::int32_t>>();
      EXPECT_EQ(DetokenizeInSteps(*tokenizer, greedy), prompt[weights]["text"].get<std::string>());
    }
  }
}

TEST(TokenizerGoldenTest, SmolLm2NamesItsSpecialTokens) {
  MODEL_OR_SKIP(kSmolLm2, "scripts/fetch_model.sh");
  const std::unique_ptr<Tokenizer> tokenizer = MustLoad(kSmolLm2);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->TokenBytes(1), "<|im_start|>");
  EXPECT_EQ(tokenizer->TokenBytes(2), "<|im_end|>");
  EXPECT_TRUE(tokenizer->IsSpecial(2));
  EXPECT_FALSE(tokenizer->IsSpecial(17));
}

class TinyCheckpointTest : public testing::TestWithParam<const char*> {};

// Their vocabularies have every byte, so no text is lost on the way there and back.
TEST_P(TinyCheckpointTest, TextsComeBackAsTheyWere) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  WEFT_GOLDEN_OR_SKIP(texts, "tokenizers/smollm2.json");
  const std::unique_ptr<Tokenizer> tokenizer = MustLoad(dir / "tokenizer.json");
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), ReadJson(dir / "config.json")["vocab_size"].get<int>());
  for (const nlohmann::json& entry : ReadJson(texts)["texts"]) {
    const auto text = entry["text"].get<std::string>();
    EXPECT_EQ(Detokenize(*tokenizer, MustEncode(*tokenizer, text), false), text);
  }
}

INSTANTIATE_TEST_SUITE_P(All, TinyCheckpointTest,
                         testing::Values("llama_gqa", "llama_mqa", "llama_odd", "llama3_rope",
                                         "deepseek_v2_lite"),
                         [](const auto& info) { return std::string(info.param); });

class FetchedTokenizerTest : public testing::TestWithParam<const char*> {};

TEST_P(FetchedTokenizerTest, TextsHaveNoDifference) {
  WEFT_GOLDEN_OR_SKIP(path, std::string("tokenizers/") + GetParam() + ".json");
  const std::string file =
      std::string(WEFT_SOURCE_DIR "/models/tokenizers/") + GetParam() + ".json";
  if (!std::filesystem::exists(file)) {
    EXPECT_EQ(std::system("bash " WEFT_SOURCE_DIR "/scripts/fetch_tokenizers.sh"), 0);
  }
  MODEL_OR_SKIP(file, "scripts/fetch_tokenizers.sh");
  const std::unique_ptr<Tokenizer> tokenizer = MustLoad(file);
  ASSERT_NE(tokenizer, nullptr);
  CheckTexts(*tokenizer, ReadJson(path));
}

INSTANTIATE_TEST_SUITE_P(All, FetchedTokenizerTest,
                         testing::Values("gpt2", "llama3", "qwen2", "deepseek_v3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace weft
