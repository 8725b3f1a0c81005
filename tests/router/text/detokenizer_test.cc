#include "router/text/detokenizer.h"

#include <random>
#include <vector>

#include "router/text/utf8.h"
#include "tests/router/text/text_testing.h"

namespace weft {
namespace {

// Ids 0..255 are the bytes; see SmallTokenizer().
std::vector<std::int32_t> Bytes(std::string_view bytes) {
  std::vector<std::int32_t> ids;
  for (const char byte : bytes) ids.push_back(static_cast<std::uint8_t>(byte));
  return ids;
}

// Ids that make whole characters, pieces of them, and noise.
std::vector<std::int32_t> RandomIds(std::mt19937& random) {
  static const std::vector<std::string> kCharacters = {"a",  "é",      "日",
                                                       "𠮷", "\u00a0", "\xEF\xBF\xBD"};
  std::vector<std::int32_t> ids;
  const int num_parts = 1 + random() % 12;
  for (int i = 0; i < num_parts; ++i) {
    switch (random() % 4) {
      case 0:
        ids.push_back(random() % 270);  // some of them no token
        break;
      case 1:
        ids.push_back(0x80 + random() % 0x80);
        break;
      default: {
        const std::string& character = kCharacters[random() % kCharacters.size()];
        const bool whole = random() % 3 != 0;
        const auto bytes = Bytes(whole ? character : character.substr(0, 1 + random() % 3));
        ids.insert(ids.end(), bytes.begin(), bytes.end());
      }
    }
  }
  return ids;
}

TEST(DetokenizerTest, HoweverIdsAreCutTheTextIsTheSameAndNoDeltaEndsInACharacter) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  for (unsigned seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const std::vector<std::int32_t> ids = RandomIds(random);
    for (const bool skip : {false, true}) {
      const std::string whole = Detokenize(*tokenizer, ids, skip);
      ASSERT_EQ(FindInvalidUtf8(whole), std::nullopt) << "seed " << seed;
      Detokenizer detokenizer(*tokenizer, skip);
      for (std::size_t cut = 0; cut <= ids.size(); ++cut) {
        const absl::Span<const std::int32_t> span(ids);
        const std::string first = detokenizer.Append(span.subspan(0, cut));
        const std::string second = detokenizer.Append(span.subspan(cut));
        const std::string rest = detokenizer.Finish();
        for (const std::string& delta : {first, second, rest}) {
          ASSERT_EQ(FindInvalidUtf8(delta), std::nullopt) << "seed " << seed << " cut " << cut;
        }
        ASSERT_EQ(first + second + rest, whole) << "seed " << seed << " cut " << cut;
      }
      std::string text;
      for (const std::int32_t id : ids) text += detokenizer.Append({&id, 1});
      ASSERT_EQ(text + detokenizer.Finish(), whole) << "seed " << seed;
    }
  }
}

TEST(DetokenizerTest, ValidTextComesBackFromItsBytes) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  const std::string text = "the é 日本語 𠮷 \u200d👩‍👧 end\n";
  EXPECT_EQ(Detokenize(*tokenizer, Bytes(text)), text);
}

// The examples of the Unicode standard, section 3.9, tables 3-9 to 3-11.
TEST(DetokenizerTest, EachMaximalPartOfInvalidBytesIsOneReplacementCharacter) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  const std::string u = "\uFFFD";
  EXPECT_EQ(Detokenize(*tokenizer, Bytes("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41")),
            u + u + u + u + u + u + u + u + "A");
  EXPECT_EQ(Detokenize(*tokenizer, Bytes("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41")),
            u + u + u + u + u + u + u + u + "A");
  EXPECT_EQ(Detokenize(*tokenizer, Bytes("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41")),
            u + u + u + u + "A");
}

TEST(DetokenizerTest, AStartedCharacterWaitsAndIsReplacedAtTheEnd) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  Detokenizer detokenizer(*tokenizer);
  EXPECT_EQ(detokenizer.Append(Bytes("a\xE6")), "a");
  EXPECT_EQ(detokenizer.Append(Bytes("\x97")), "");
  EXPECT_EQ(detokenizer.Append(Bytes("\xA5z")), "日z");
  EXPECT_EQ(detokenizer.Append(Bytes("\xF0\x9F")), "");
  EXPECT_EQ(detokenizer.Finish(), "\uFFFD");
  EXPECT_EQ(detokenizer.Finish(), "");
}

TEST(DetokenizerTest, SpecialTokensAreSkippedUnlessAskedFor) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  const std::vector<std::int32_t> ids = {257, 259, 260};
  EXPECT_EQ(Detokenize(*tokenizer, ids), "the<tool>");
  EXPECT_EQ(Detokenize(*tokenizer, ids, false), "the<end><tool>");
}

TEST(DetokenizerTest, ASpecialTokenDoesNotEndACharacter) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  EXPECT_EQ(Detokenize(*tokenizer, std::vector<std::int32_t>{0xC3, 259, 0xA9}), "é");
  EXPECT_EQ(Detokenize(*tokenizer, std::vector<std::int32_t>{0xC3, 259, 0xA9}, false),
            "\uFFFD<end>\uFFFD");
}

TEST(DetokenizerTest, IdsWithoutATokenAreSkipped) {
  const std::unique_ptr<Tokenizer> tokenizer = MustParse(SmallTokenizer());
  EXPECT_EQ(Detokenize(*tokenizer, std::vector<std::int32_t>{-1, 257, 261, 1 << 30}), "the");
}

}  // namespace
}  // namespace weft
