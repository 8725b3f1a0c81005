#include "router/text/bad_words.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/byte_tokenizer.h"

namespace weft {
namespace {

using ::testing::ElementsAre;

// Every byte a token: "word" and " word" differ in length, so that the second is no sequence.
TEST(BadWordsTest, AWordBehindASpaceOfMoreTokensIsCoveredByTheWord) {
  const auto tokenizer = ByteTokenizer();
  const auto sequences = BadWordTokens(*tokenizer, "ab");
  ASSERT_TRUE(sequences.ok()) << sequences.status();
  EXPECT_THAT(*sequences, ElementsAre(ElementsAre('a', 'b')));
  EXPECT_EQ(BadWordTokens(*tokenizer, " \t\nab").value(), *sequences);
}

TEST(BadWordsTest, AWordWithoutATokenIsRefused) {
  const auto tokenizer = ByteTokenizer();
  for (const char* word : {"", " ", " \n\t"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(BadWordTokens(*tokenizer, word).status())) << word;
  }
}

// With merges, " ab" is one token as "ab" is, and another one.
TEST(BadWordsTest, AWordWithATokenOfItsOwnBehindASpaceIsTwoSequences) {
  const std::string json = R"({
    "version": "1.0", "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "c": 5},
              "merges": ["a b", "Ġ ab"]}})";
  const auto tokenizer = Tokenizer::Parse(json, "merged");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(BadWordTokens(**tokenizer, "ab").value(),
              ElementsAre(ElementsAre(3), ElementsAre(4)));
  EXPECT_THAT(BadWordTokens(**tokenizer, " abc").value(),
              ElementsAre(ElementsAre(3, 5), ElementsAre(4, 5)));
}

}  // namespace
}  // namespace weft
