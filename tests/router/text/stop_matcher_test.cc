#include "router/text/stop_matcher.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

struct Found {
  std::string stop;
  std::size_t end;
  bool operator==(const Found&) const = default;
};

// The definition, read from left to right: the first byte at which a stop string ends, of those
// that end there the longest.
std::optional<Found> BruteForce(std::string_view text, const std::vector<std::string>& stops) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::optional<Found> best;
    for (const std::string& stop : stops) {
      if (!text.substr(0, end).ends_with(stop)) continue;
      if (!best || stop.size() > best->stop.size()) best = Found{stop, end};
    }
    if (best) return best;
  }
  return std::nullopt;
}

std::size_t BruteForcePending(std::string_view text, const std::vector<std::string>& stops) {
  for (std::size_t bytes = text.size(); bytes > 0; --bytes) {
    for (const std::string& stop : stops) {
      if (bytes < stop.size() && stop.starts_with(text.substr(text.size() - bytes))) return bytes;
    }
  }
  return 0;
}

// `cuts` has a bit for each place between two bytes.
void ExpectFound(std::string_view text, const std::vector<std::string>& stops, unsigned cuts) {
  SCOPED_TRACE(text);
  SCOPED_TRACE(cuts);
  StopMatcher matcher(stops);
  const std::optional<Found> expected = BruteForce(text, stops);
  std::size_t begin = 0;
  for (std::size_t end = 1; end <= text.size(); ++end) {
    if (end < text.size() && (cuts >> (end - 1) & 1) == 0) continue;
    const auto match = matcher.Read(text.substr(begin, end - begin), true);
    if (match) {
      ASSERT_TRUE(expected.has_value());
      EXPECT_EQ((Found{*match->stop, begin + match->end}), *expected);
      return;
    }
    EXPECT_EQ(matcher.pending_bytes(), BruteForcePending(text.substr(0, end), stops));
    begin = end;
  }
  EXPECT_EQ(expected, std::nullopt);
}

TEST(StopMatcherTest, FindsTheFirstEndAndThereTheLongestHoweverTheTextIsCut) {
  const struct {
    std::string_view text;
    std::vector<std::string> stops;
  } cases[] = {
      {"one stop here", {"stop"}},
      {"aaaab", {"aab"}},
      {"abcabcabd", {"abcabd"}},
      {"xabcd", {"bcd", "abcd", "cd"}},  // end together: the longest
      {"xabcdx", {"abcdx", "bc"}},       // the shorter one ends first
      {"stostop", {"stop", "tos!"}},     // a beginning that does not go on
      {"ababab", {"abab", "bab"}},       // overlapping
      {"no such", {"such a"}},           // never completes
      {"a", {"a"}},                      // one byte
      {"h\xc3\xa9h\xc3\xa9!", {"\xc3\xa9!", "h\xc3\xa9?"}},
  };
  for (const auto& c : cases) {
    for (unsigned cuts = 0; cuts < 1U << (c.text.size() - 1); ++cuts) {
      ExpectFound(c.text, c.stops, cuts);
    }
  }
}

TEST(StopMatcherTest, AgreesWithBruteForceOnRandomTexts) {
  constexpr unsigned kSeed = 20261129;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  const auto text = [&random](std::size_t bytes) {
    std::string result;
    while (result.size() < bytes) result += static_cast<char>('a' + random() % 2);
    return result;
  };
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::string> stops;
    for (unsigned n = 1 + random() % 3; n > 0; --n) stops.push_back(text(1 + random() % 6));
    ExpectFound(text(1 + random() % 24), stops, random());
  }
}

TEST(StopMatcherTest, AStopStringThatEndsTooEarlyDoesNotCountButItsBytesDo) {
  StopMatcher matcher({"abab", "xy"});
  EXPECT_FALSE(matcher.Read("abab", false).has_value());
  EXPECT_EQ(matcher.pending_bytes(), 2);  // "ab" may begin the next one
  const auto match = matcher.Read("abx", true);
  ASSERT_TRUE(match.has_value());
  EXPECT_EQ(*match->stop, "abab");
  EXPECT_EQ(match->end, 2);
}

TEST(StopMatcherTest, WithoutStopStringsNothingIsHeld) {
  StopMatcher matcher({});
  EXPECT_FALSE(matcher.Read("anything", true).has_value());
  EXPECT_EQ(matcher.pending_bytes(), 0);
}

}  // namespace
}  // namespace weft
