#include "router/text/output_text.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/byte_tokenizer.h"

namespace weft {
namespace {

using ::testing::StartsWith;

class OutputTextTest : public ::testing::Test {
 protected:
  struct Result {
    std::string text;
    std::optional<std::string> stop;
    std::size_t tokens = 0;
    bool operator==(const Result&) const = default;
  };

  // One token for each byte.
  Result Run(std::string_view text, const OutputTextOptions& options) {
    OutputText output(*tokenizer_, options);
    Result result;
    for (const std::int32_t id : ByteIds(text)) {
      ++result.tokens;
      if (const std::string* stop = output.Append(id, result.text)) {
        result.stop = *stop;
        return result;
      }
    }
    output.Flush(result.text);
    return result;
  }

  const std::unique_ptr<Tokenizer> tokenizer_ = ByteTokenizer();
};

TEST_F(OutputTextTest, EndsBeforeTheStopStringOrBehindIt) {
  EXPECT_EQ(Run("some text. More", {.stop = {". "}}), (Result{"some text", ". ", 11}));
  EXPECT_EQ(Run("some text. More", {.stop = {". "}, .include_stop_str_in_output = true}),
            (Result{"some text. ", ". ", 11}));
}

TEST_F(OutputTextTest, ABeginningThatNeverCompletesIsFlushedAtTheEnd) {
  EXPECT_EQ(Run("the STO", {.stop = {"STOP"}}), (Result{"the STO", std::nullopt, 7}));
  EXPECT_EQ(Run("STOSTOP", {.stop = {"STOP"}}), (Result{"STO", "STOP", 7}));
}

TEST_F(OutputTextTest, HoldsNoMoreThanMayBecomeAStopString) {
  const std::vector<std::string> stops = {"abc", "bd"};
  OutputText output(*tokenizer_, {.stop = stops});
  std::string sent;
  std::string all;
  for (const char c : std::string_view("xabxabdabcx")) {
    all += c;
    if (output.Append(c, sent) != nullptr) break;
    std::size_t held = 0;
    for (const std::string& stop : stops) {
      for (std::size_t n = 1; n < stop.size(); ++n) {
        if (all.ends_with(stop.substr(0, n))) held = std::max(held, n);
      }
    }
    EXPECT_EQ(sent, all.substr(0, all.size() - held));
  }
  EXPECT_EQ(all, "xabxabd");
  EXPECT_EQ(sent, "xabxa");
}

TEST_F(OutputTextTest, CharactersAreWholeAtEveryByteOfTextAndStopString) {
  const std::string text = "aé€😀b";
  for (const char* stop : {"é", "€", "😀", "€😀", "b", "é€😀b", "\xEF\xBF\xBD"}) {
    OutputText output(*tokenizer_, {.stop = {stop}});
    std::string sent;
    bool stopped = false;
    for (const std::int32_t id : ByteIds(text)) {
      stopped = output.Append(id, sent) != nullptr;
      EXPECT_THAT(text, StartsWith(sent));
      EXPECT_TRUE(tokenizer_->Encode(sent, false).ok()) << "half a character: " << sent;
      if (stopped) break;
    }
    if (!stopped) output.Flush(sent);
    EXPECT_EQ(sent, text.substr(0, text.find(stop)));
  }
}

TEST_F(OutputTextTest, AHalfCharacterAtTheEndBecomesAReplacementCharacter) {
  EXPECT_EQ(Run("ab\xE2\x82", {.stop = {"b!"}}).text, "ab\uFFFD");
}

TEST_F(OutputTextTest, StopStringsCountBehindMinTokensOnly) {
  // "b" ends with the second token, then with the fifth.
  for (std::int64_t min_tokens = 0; min_tokens <= 6; ++min_tokens) {
    const Result result = Run("abxabx", {.stop = {"b"}, .min_tokens = min_tokens});
    if (min_tokens < 2) {
      EXPECT_EQ(result, (Result{"a", "b", 2})) << min_tokens;
    } else if (min_tokens < 5) {
      EXPECT_EQ(result, (Result{"abxa", "b", 5})) << min_tokens;
    } else {
      EXPECT_EQ(result, (Result{"abxabx", std::nullopt, 6})) << min_tokens;
    }
  }
  // One that begins before and ends behind counts.
  EXPECT_EQ(Run("abcd", {.stop = {"bcd"}, .min_tokens = 3}), (Result{"a", "bcd", 4}));
}

TEST_F(OutputTextTest, SpecialTokensHaveTextOnlyWhenAskedFor) {
  for (const bool skip : {true, false}) {
    OutputText output(*tokenizer_, {.stop = {"d>"}, .skip_special_tokens = skip});
    std::string sent;
    EXPECT_EQ(output.Append('a', sent), nullptr);
    const std::string* stop = output.Append(kEndToken, sent);
    EXPECT_EQ(stop == nullptr, skip);
    EXPECT_EQ(sent, skip ? "a" : "a<en");
  }
}

// A router that takes over after any token goes on with the text exactly where the other one was.
TEST_F(OutputTextTest, WhatIsSentAfterATokenDependsOnTheTokensOnly) {
  const std::string text = "xaé ST€ STOP x";
  const OutputTextOptions options = {.stop = {"STOP", "€!"}};
  const Result whole = Run(text, options);
  const std::vector<std::int32_t> ids = ByteIds(text);
  for (std::size_t cut = 0; cut < whole.tokens; ++cut) {
    OutputText first(*tokenizer_, options);
    OutputText second(*tokenizer_, options);
    std::string sent;
    std::string known;
    for (std::size_t i = 0; i < cut; ++i) {
      first.Append(ids[i], sent);
      second.Append(ids[i], known);
    }
    EXPECT_EQ(sent, known);
    std::string rest;
    for (std::size_t i = cut; i < whole.tokens; ++i) second.Append(ids[i], rest);
    EXPECT_EQ(sent + rest, whole.text) << cut;
  }
}

}  // namespace
}  // namespace weft
