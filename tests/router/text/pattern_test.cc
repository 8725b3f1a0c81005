#include "router/text/pattern.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> Matches(const absl::StatusOr<Pattern>& pattern, const std::string& text) {
  EXPECT_TRUE(pattern.ok()) << pattern.status();
  std::vector<TextRange> ranges;
  EXPECT_TRUE(pattern->FindAll(text, ranges).ok());
  std::vector<std::string> matches;
  for (const TextRange& range : ranges) {
    matches.push_back(text.substr(range.begin, range.end - range.begin));
  }
  return matches;
}

std::vector<std::string> Matches(std::string_view pattern, const std::string& text) {
  return Matches(Pattern::Compile(pattern), text);
}

// Each of these was compared with Oniguruma 6.9.10 through the tokenizers library.
TEST(PatternTest, ReadsWhatRubyAndPerlReadDifferently) {
  // White space is that of Unicode: not U+180E.
  EXPECT_THAT(Matches("\\s+", "a\u00a0\u2003b\u180ec\x0b"), ElementsAre("\u00a0\u2003", "\x0b"));
  EXPECT_THAT(Matches("\\S+", " \u180e "), ElementsAre("\u180e"));
  EXPECT_THAT(Matches("[^\\s]+", " \u180e "), ElementsAre("\u180e"));
  EXPECT_THAT(Matches("[\\S]+", "\u3000\u180ex"), ElementsAre("\u180ex"));
  // \v is one character, ^ and $ are at every line.
  EXPECT_THAT(Matches("\\v", "\n\x0b\r"), ElementsAre("\x0b"));
  EXPECT_THAT(Matches("^.$", "a\nb\ncd"), ElementsAre("a", "b"));
  // A class in a class is a union; a hyphen beside a class escape is itself.
  EXPECT_THAT(Matches("[a[bc]]+", "abcd"), ElementsAre("abc"));
  EXPECT_THAT(Matches("[\\d-z]+", "1-z2y"), ElementsAre("1-z2"));
  EXPECT_THAT(Matches("[]a]+", "a]b"), ElementsAre("a]"));
  EXPECT_THAT(Matches("\\u00e9|\\x{e8}|\\x41", "éèA"), ElementsAre("é", "è", "A"));
}

TEST(PatternTest, KnowsWhatUnicode15And16Assigned) {
  EXPECT_THAT(Matches("\\p{L}", "\U00031350\U0002EBF0\U0001E4D0"),
              ElementsAre("\U00031350", "\U0002EBF0", "\U0001E4D0"));
  EXPECT_THAT(Matches("\\p{Nd}", "\U00010D40a"), ElementsAre("\U00010D40"));
  EXPECT_THAT(Matches("[^\\p{L}]", "\U00031350!"), ElementsAre("!"));
  EXPECT_THAT(Matches("\\P{L}", "\U00031350!"), ElementsAre("!"));
  EXPECT_THAT(Matches("\\p{^L}", "a!"), ElementsAre("!"));
}

TEST(PatternTest, CaseFoldsAsUnicodeDoes) {
  EXPECT_THAT(Matches("(?i:'s|'re)", "'S'Re'\u017f"), ElementsAre("'S", "'Re", "'\u017f"));
}

TEST(PatternTest, AnEmptyMatchIsNotFoundWhereTheOneBeforeEnded) {
  EXPECT_THAT(Matches("a*", "aab"), ElementsAre("aa", ""));
  EXPECT_THAT(Matches("x*", "é"), ElementsAre("", ""));
  EXPECT_THAT(Matches("x*", ""), ElementsAre(""));
}

TEST(PatternTest, ALiteralHasNoOperators) {
  EXPECT_THAT(Matches(Pattern::CompileLiteral("a.(["), "a.([aX(["), ElementsAre("a.(["));
}

TEST(PatternTest, RefusesByNameWhatHasNoEqual) {
  for (const std::string pattern :
       {"\\w+",        "\\bx",      "\\h",      "\\R",     "\\1",   "\\p{Han}", "\\pL",
        "[[:alpha:]]", "[a&&b]",    "[a[^b]]",  "a{1,3}+", "a{2}?", "a{,3}",    "(?<name>a)",
        "(?m:a)",      "(*ACCEPT)", "[\\P{L}]", "[\\D]",   "\\xe9", "\\u00",    "\\x{",
        "[a",          "a\\",       "\\p{L",    "\\Qa",    "(?#x)", "\\p{Cn}"}) {
    const absl::StatusOr<Pattern> compiled = Pattern::Compile(pattern);
    ASSERT_FALSE(compiled.ok()) << pattern;
    EXPECT_EQ(compiled.status().code(), absl::StatusCode::kInvalidArgument) << pattern;
    EXPECT_THAT(std::string(compiled.status().message()), HasSubstr("not supported")) << pattern;
  }
  for (const std::string pattern : {"(a", "a)", "[z-a]", "*"}) {
    const absl::StatusOr<Pattern> compiled = Pattern::Compile(pattern);
    ASSERT_FALSE(compiled.ok()) << pattern;
    EXPECT_THAT(std::string(compiled.status().message()), HasSubstr("does not compile")) << pattern;
  }
}

TEST(PatternTest, ALongRunIsGivenUpInTime) {
  const std::string spaces(3 << 20, ' ');
  EXPECT_THAT(Matches("\\s*[\\r\\n]+|\\s+(?!\\S)", spaces), ElementsAre(spaces));
}

TEST(PatternTest, BacktrackingWithoutEndIsAnError) {
  const absl::StatusOr<Pattern> pattern = Pattern::Compile("(?:a|a|aa)+b|(?:x+x+)+y");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  std::vector<TextRange> matches;
  const absl::Status status = pattern->FindAll(std::string(60, 'x'), matches);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace weft
