#include <thread>
#include <vector>

#include "router/text/detokenizer.h"
#include "tests/router/text/text_testing.h"

namespace weft {
namespace {

void CheckAll(const Tokenizer& tokenizer, const nlohmann::json& variant) {
  for (const nlohmann::json& entry : variant["texts"]) {
    const auto text = entry["text"].get<std::string>();
    for (const bool with_special : {false, true}) {
      const absl::StatusOr<std::vector<std::int32_t>> ids = tokenizer.Encode(text, with_special);
      ASSERT_TRUE(ids.ok()) << ids.status() << " for " << text;
      EXPECT_EQ(nlohmann::json(*ids), entry[with_special ? "ids_with_special" : "ids"]) << text;
    }
  }
  for (const nlohmann::json& entry : variant["decodings"]) {
    const auto ids = entry["ids"].get<std::vector<std::int32_t>>();
    EXPECT_EQ(Detokenize(tokenizer, ids, false), entry["text"].get<std::string>()) << entry["ids"];
    EXPECT_EQ(Detokenize(tokenizer, ids, true), entry["text_without_special"].get<std::string>())
        << entry["ids"];
  }
}

TEST(TokenizerFeaturesTest, EveryFeatureIsAsInTheReferenceLibrary) {
  const nlohmann::json variants = ReadFeatures();
  ASSERT_EQ(variants.size(), 12U);
  for (std::size_t i = 0; i < variants.size(); ++i) {
    SCOPED_TRACE(i);
    const std::unique_ptr<Tokenizer> tokenizer = MustParse(variants[i]["tokenizer"]);
    ASSERT_NE(tokenizer, nullptr);
    CheckAll(*tokenizer, variants[i]);
  }
}

TEST(TokenizerFeaturesTest, ManyThreadsMayUseOneTokenizer) {
  const nlohmann::json variants = ReadFeatures();
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(variants[0]["tokenizer"]);
  ASSERT_NE(tokenizer, nullptr);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { CheckAll(*tokenizer, variants[0]); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace weft
