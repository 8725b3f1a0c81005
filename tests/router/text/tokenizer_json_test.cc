#include <functional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "router/text/detokenizer.h"
#include "tests/router/text/text_testing.h"

namespace weft {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

void ExpectRefused(std::string_view text, std::string_view mention) {
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Parse(text, "FILE");
  ASSERT_FALSE(tokenizer.ok()) << mention;
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(tokenizer.status().message());
  EXPECT_THAT(message, HasSubstr("FILE"));
  EXPECT_THAT(message, HasSubstr(std::string(mention)));
}

struct Change {
  const char* mention;
  std::function<void(json&)> apply;
};

void ExpectRefused(const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    json config = SmallTokenizer();
    change.apply(config);
    ExpectRefused(config.dump(), change.mention);
  }
}

TEST(TokenizerJsonTest, RefusesWhatItDoesNotSupportByName) {
  ExpectRefused({
      {"Unigram", [](json& c) { c["model"]["type"] = "Unigram"; }},
      {"WordPiece", [](json& c) { c["model"]["type"] = "WordPiece"; }},
      {"byte_fallback", [](json& c) { c["model"]["byte_fallback"] = true; }},
      {"dropout", [](json& c) { c["model"]["dropout"] = 0.1; }},
      {"end_of_word_suffix", [](json& c) { c["model"]["end_of_word_suffix"] = "</w>"; }},
      {"Lowercase", [](json& c) { c["normalizer"]["type"] = "Lowercase"; }},
      {"Metaspace", [](json& c) { c["pre_tokenizer"]["type"] = "Metaspace"; }},
      {"ByteLevel", [](json& c) { c.erase("pre_tokenizer"); }},
      {"after ByteLevel",
       [](json& c) {
         c["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers", {c["pre_tokenizer"], {{"type", "Digits"}}}}};
       }},
      {"pre_tokenizer.pretokenizers[0]",
       [](json& c) {
         const json split = {
             {"type", "Split"}, {"pattern", {{"Regex", "\\w+"}}}, {"behavior", "Isolated"}};
         c["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers", {split, c["pre_tokenizer"]}}};
       }},
      {"BertProcessing", [](json& c) { c["post_processor"]["type"] = "BertProcessing"; }},
      {"decoder", [](json& c) { c.erase("decoder"); }},
      {"WordPiece", [](json& c) { c["decoder"]["type"] = "WordPiece"; }},
  });
}

TEST(TokenizerJsonTest, RefusesIdsThatCannotBe) {
  ExpectRefused({
      {"model.vocab.x", [](json& c) { c["model"]["vocab"]["x"] = -1; }},
      {"model.vocab.x", [](json& c) { c["model"]["vocab"]["x"] = 1.5; }},
      {"model.vocab.x", [](json& c) { c["model"]["vocab"]["x"] = "7"; }},
      {"model.vocab.x", [](json& c) { c["model"]["vocab"]["x"] = 0xFFFFFFFFFFFFFFFFULL; }},
      {"2147483648", [](json& c) { c["model"]["vocab"]["x"] = 2147483648U; }},
      {"must be under", [](json& c) { c["model"]["vocab"]["x"] = 2147483647; }},
      {"id 7 twice", [](json& c) { c["model"]["vocab"]["x"] = 7; }},
      {"added_tokens[0].id", [](json& c) { c["added_tokens"][0]["id"] = 300; }},
      {"added_tokens[1].id", [](json& c) { c["added_tokens"][1]["id"] = 259; }},
      {"repeats", [](json& c) { c["added_tokens"][1]["content"] = "<end>"; }},
      {"no content", [](json& c) { c["added_tokens"][1]["content"] = ""; }},
      {"vocab", [](json& c) { c["model"]["unk_token"] = "absent"; }},
  });
}

TEST(TokenizerJsonTest, RefusesWrongTypesAndMergesOutOfTheVocabulary) {
  ExpectRefused({
      {"an object", [](json& c) { c = json::array(); }},
      {"model", [](json& c) { c["model"] = 3; }},
      {"model", [](json& c) { c.erase("model"); }},
      {"vocab", [](json& c) { c["model"]["vocab"] = json::array(); }},
      {"merges", [](json& c) { c["model"]["merges"] = json::object(); }},
      {"merges", [](json& c) { c["model"]["merges"][0] = "t h e"; }},
      {"merges", [](json& c) { c["model"]["merges"][0] = "th"; }},
      {"merges",
       [](json& c) {
         c["model"]["merges"][0] = {"t", "h", "e"};
       }},
      {"merges",
       [](json& c) {
         c["model"]["merges"][0] = {"t", 3};
       }},
      {"\"hz\" at 0", [](json& c) { c["model"]["merges"][0] = "h z"; }},
      {"added_tokens", [](json& c) { c["added_tokens"] = "none"; }},
      {"added_tokens[0].special", [](json& c) { c["added_tokens"][0]["special"] = 1; }},
      {"added_tokens[0].lstrip", [](json& c) { c["added_tokens"][0].erase("lstrip"); }},
      {"normalizers",
       [](json& c) {
         c["normalizer"] = {{"type", "Sequence"}};
       }},
      {"ignore_merges", [](json& c) { c["model"]["ignore_merges"] = "yes"; }},
      {"pre_tokenizer.type", [](json& c) { c["pre_tokenizer"].erase("type"); }},
  });
}

TEST(TokenizerJsonTest, RefusesTemplatesThatCannotBe) {
  const auto set = [](json& c, json single) {
    c["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", std::move(single)},
        {"special_tokens",
         {{"<end>", {{"id", "<end>"}, {"ids", {259}}}}, {"x", {{"ids", {999}}}}}}};
  };
  const json text = {{"Sequence", {{"id", "A"}}}};
  const auto special = [](const char* name) { return json{{"SpecialToken", {{"id", name}}}}; };
  ExpectRefused({
      {"no sequence", [&](json& c) { set(c, {special("<end>")}); }},
      {"only sequence",
       [&](json& c) {
         set(c, {text, text});
       }},
      {"special_tokens.absent",
       [&](json& c) {
         set(c, {special("absent"), text});
       }},
      {"999, which is no token",
       [&](json& c) {
         set(c, {special("x"), text});
       }},
  });
  json config = SmallTokenizer();
  set(config, {special("<end>"), text, special("<end>")});
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(config);
  EXPECT_EQ(*tokenizer->Encode("the", true), (std::vector<std::int32_t>{259, 257, 259}));
  EXPECT_EQ(*tokenizer->Encode("the", false), (std::vector<std::int32_t>{257}));
}

TEST(TokenizerJsonTest, RefusesDeepNestingWithoutRecursion) {
  for (const int depth : {100, 100'000}) {
    ExpectRefused(std::string(depth, '['), "deeper");
    ExpectRefused(std::string(depth, '[') + std::string(depth, ']'), "deeper");
    std::string objects;
    for (int i = 0; i < depth; ++i) objects += "{\"a\":";
    ExpectRefused(objects, "deeper");
  }
}

TEST(TokenizerJsonTest, SaysWhereItIsNoJson) {
  ExpectRefused("", "at byte");
  ExpectRefused("{\"model\": }", "at byte 11");
  ExpectRefused("{\"model\": \"\xFF\"}", "at byte");
  ExpectRefused("{\"model\": \"\\ud800\"}", "at byte");
  ExpectRefused("{\"model\": 1e999}", "at byte");
}

// None is a valid file, and none may crash.
TEST(TokenizerJsonTest, EveryTruncationIsRefused) {
  const std::string text = SmallTokenizer().dump();
  for (std::size_t n = 0; n < text.size(); ++n) {
    EXPECT_FALSE(Tokenizer::Parse(text.substr(0, n), "FILE").ok()) << n;
  }
}

TEST(TokenizerJsonTest, NoChangeOfSomeBytesCrashes) {
  const json variants = ReadFeatures();
  int num_accepted = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    std::mt19937 random(seed);
    std::string text = variants[seed % variants.size()]["tokenizer"].dump();
    const int num_changes = 1 + random() % 3;
    for (int i = 0; i < num_changes; ++i) {
      const std::size_t at = random() % text.size();
      if (random() % 2 == 0) {
        text[at] = "0919{}[]\",:-. \\tna"[random() % 18];
      } else {
        text.erase(at, 1 + random() % 8);
      }
    }
    const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Parse(text, "FILE");
    if (!tokenizer.ok()) continue;
    ++num_accepted;
    const auto ids = (*tokenizer)->Encode("the é 日 <a> x\n 123", true);
    if (ids.ok()) Detokenize(**tokenizer, *ids);
  }
  EXPECT_GT(num_accepted, 0);
}

TEST(TokenizerJsonTest, AFileThatIsNotThereIsNotFound) {
  for (const char* path : {"/nonexistent/tokenizer.json", "/"}) {
    const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(path);
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kNotFound) << tokenizer.status();
    EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(path));
  }
}

TEST(TokenizerTest, TextThatIsNotUtf8IsRefusedByOffset) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  for (const std::string text : {"the\xFFx", "the\xE6\x97", "the\xED\xA0\x80"}) {
    const absl::Status status = tokenizer->Encode(text, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("byte 3"));
  }
}

TEST(TokenizerTest, TextOverTheLimitIsRefused) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  const std::string text(Tokenizer::kMaxTextBytes + 1, 'x');
  EXPECT_EQ(tokenizer->Encode(text, false).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(TokenizerTest, EveryTokenHasItsBytes) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  EXPECT_EQ(tokenizer->vocab_size(), 261);
  for (std::int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    ASSERT_TRUE(tokenizer->TokenBytes(id)) << id;
    EXPECT_EQ(tokenizer->IsSpecial(id), id == 259);
  }
  EXPECT_EQ(tokenizer->TokenBytes(258), " the");
  EXPECT_EQ(tokenizer->TokenBytes(261), std::nullopt);
  EXPECT_EQ(tokenizer->TokenBytes(-1), std::nullopt);
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
}

}  // namespace
}  // namespace weft
