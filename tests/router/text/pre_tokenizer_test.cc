#include "router/text/pre_tokenizer.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> Cut(const std::string& text, SplitBehavior behavior, bool invert = false) {
  const absl::StatusOr<Pattern> hyphen = Pattern::CompileLiteral("-");
  std::vector<TextRange> matches;
  EXPECT_TRUE(hyphen->FindAll(text, matches).ok());
  std::vector<std::string_view> pieces;
  SplitAtMatches(text, matches, behavior, invert, pieces);
  return {pieces.begin(), pieces.end()};
}

// The examples of the tokenizers library's documentation.
TEST(PreTokenizerTest, SplitBehaviors) {
  const std::string text = "the-final--countdown";
  EXPECT_THAT(Cut(text, SplitBehavior::kRemoved), ElementsAre("the", "final", "countdown"));
  EXPECT_THAT(Cut(text, SplitBehavior::kIsolated),
              ElementsAre("the", "-", "final", "-", "-", "countdown"));
  EXPECT_THAT(Cut(text, SplitBehavior::kMergedWithPrevious),
              ElementsAre("the-", "final-", "-", "countdown"));
  EXPECT_THAT(Cut(text, SplitBehavior::kMergedWithNext),
              ElementsAre("the", "-final", "-", "-countdown"));
  EXPECT_THAT(Cut(text, SplitBehavior::kContiguous),
              ElementsAre("the", "-", "final", "--", "countdown"));
  EXPECT_THAT(Cut(text, SplitBehavior::kRemoved, /*invert=*/true), ElementsAre("-", "-", "-"));
}

TEST(PreTokenizerTest, NoPieceIsEmpty) {
  for (const SplitBehavior behavior :
       {SplitBehavior::kRemoved, SplitBehavior::kIsolated, SplitBehavior::kMergedWithPrevious,
        SplitBehavior::kMergedWithNext, SplitBehavior::kContiguous}) {
    EXPECT_THAT(Cut("", behavior), ElementsAre());
    EXPECT_THAT(Cut("x", behavior), ElementsAre("x"));
  }
}

TEST(PreTokenizerTest, ThePrefixSpaceGoesToEveryPieceThatHasNone) {
  PreTokenizer pre_tokenizer;
  pre_tokenizer.steps.push_back({*Pattern::CompileLiteral("-"), SplitBehavior::kIsolated});
  pre_tokenizer.add_prefix_space = true;
  pre_tokenizer.prefix_at = 1;
  std::deque<std::string> storage;
  EXPECT_THAT(*pre_tokenizer.Split("a- b", storage), ElementsAre(" a", " -", " b"));
}

}  // namespace
}  // namespace weft
