#include "router/validate.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

const RequestLimits kLimits = {
    .served_model_name = "tiny", .max_prompt_bytes = 8, .max_stop_token_ids = 2};

v1::GenerateRequest Valid() {
  v1::GenerateRequest request;
  request.set_text("hello");
  return request;
}

struct Case {
  std::string message;  // part of the error; empty when the request is fine
  std::function<void(v1::GenerateRequest&, v1::SamplingParams&)> change;
};

// One row for each limit, on either side of it.
TEST(ValidateTest, RefusesWhatIsOutOfRangeAndSaysWhatIsAllowed) {
  using R = v1::GenerateRequest;
  using S = v1::SamplingParams;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<Case> cases = {
      {"", [](R&, S&) {}},
      {"", [](R& r, S&) { r.set_request_id(std::string(128, 'x')); }},
      {"request_id has 129 bytes; at most 128",
       [](R& r, S&) { r.set_request_id(std::string(129, 'x')); }},
      {"", [](R& r, S&) { r.set_model("tiny"); }},
      {"model is \"huge\"; \"tiny\" is served", [](R& r, S&) { r.set_model("huge"); }},
      {"no prompt", [](R& r, S&) { r.clear_prompt(); }},
      {"prompt is empty", [](R& r, S&) { r.set_text(""); }},
      {"prompt is empty", [](R& r, S&) { r.mutable_token_ids(); }},
      {"", [](R& r, S&) { r.set_text("12345678"); }},
      {"9 bytes; at most 8", [](R& r, S&) { r.set_text("123456789"); }},
      {"", [](R&, S& s) { s.set_max_tokens(1); }},
      {"max_tokens is 0; at least 1", [](R&, S& s) { s.set_max_tokens(0); }},
      {"max_tokens is -5; at least 1", [](R&, S& s) { s.set_max_tokens(-5); }},
      {"", [](R&, S& s) { s.set_temperature(0); }},
      {"", [](R&, S& s) { s.set_temperature(kMinTemperature); }},
      {"", [](R&, S& s) { s.set_temperature(kMaxTemperature); }},
      {"temperature is 1e-06;", [](R&, S& s) { s.set_temperature(1e-6F); }},
      {"temperature is -0.5;", [](R&, S& s) { s.set_temperature(-0.5F); }},
      {"temperature is inf;", [](R&, S& s) { s.set_temperature(kInf); }},
      {"temperature is nan;", [](R&, S& s) { s.set_temperature(std::nanf("")); }},
      {"", [](R&, S& s) { s.set_top_p(1); }},
      {"", [](R&, S& s) { s.set_top_p(1e-6F); }},
      {"top_p is 0;", [](R&, S& s) { s.set_top_p(0); }},
      {"top_p is 1.5;", [](R&, S& s) { s.set_top_p(1.5F); }},
      {"top_p is nan;", [](R&, S& s) { s.set_top_p(std::nanf("")); }},
      {"", [](R&, S& s) { s.set_top_k(-1); }},
      {"", [](R&, S& s) { s.set_top_k(0); }},
      {"", [](R&, S& s) { s.set_top_k(std::numeric_limits<std::int32_t>::max()); }},
      {"top_k is -2;", [](R&, S& s) { s.set_top_k(-2); }},
      {"", [](R&, S& s) { s.mutable_stop_token_ids()->Resize(2, 1); }},
      {"3 stop_token_ids; at most 2", [](R&, S& s) { s.mutable_stop_token_ids()->Resize(3, 1); }},
  };
  for (const Case& c : cases) {
    v1::GenerateRequest request = Valid();
    c.change(request, *request.mutable_sampling());
    const absl::Status status = ValidateRequest(request, kLimits);
    SCOPED_TRACE(request.ShortDebugString());
    if (c.message.empty()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    }
  }
}

TEST(ValidateTest, RefusesTextWithoutATokenizer) {
  RequestLimits limits = kLimits;
  limits.text_prompts = false;
  EXPECT_TRUE(absl::IsInvalidArgument(ValidateRequest(Valid(), limits)));
  v1::GenerateRequest ids;
  ids.mutable_token_ids()->add_ids(1);
  EXPECT_TRUE(ValidateRequest(ids, limits).ok());
}

TEST(ValidateTest, RefusesTokensOutsideTheVocabulary) {
  EXPECT_TRUE(ValidateTokens({0, 9}, {9}, 10).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ValidateTokens({}, {}, 10)));
  EXPECT_THAT(std::string(ValidateTokens({0, 10}, {}, 10).message()),
              HasSubstr("prompt_token_ids[1] is 10; ids from 0 to 9"));
  EXPECT_THAT(std::string(ValidateTokens({0, -1}, {}, 10).message()),
              HasSubstr("prompt_token_ids[1] is -1"));
  EXPECT_THAT(std::string(ValidateTokens({0}, {3, 10}, 10).message()),
              HasSubstr("stop_token_ids[1] is 10"));
}

TEST(ValidateTest, KeepsRoomForOneTokenBehindThePrompt) {
  EXPECT_TRUE(ValidatePromptLength(31, 32).ok());
  const absl::Status status = ValidatePromptLength(32, 32);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("32 tokens; at most 31"));
}

}  // namespace
}  // namespace weft
