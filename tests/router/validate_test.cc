#include "router/validate.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

const RequestLimits kLimits = {.served_model_name = "tiny",
                               .max_prompt_bytes = 8,
                               .max_prompt_tokens = 20,
                               .max_chat_messages = 2,
                               .max_n = 3,
                               .max_stop_strings = 2,
                               .max_stop_string_bytes = 4,
                               .max_stop_token_ids = 2,
                               .max_bad_words = 2,
                               .max_bad_word_tokens = 2,
                               .max_logit_bias = 2,
                               .max_logprobs = 5};

v1::GenerateRequest Valid() {
  v1::GenerateRequest request;
  request.set_text("hello");
  return request;
}

void Say(v1::GenerateRequest& request,
         const std::vector<std::pair<v1::Role, std::string>>& messages) {
  v1::Chat& chat = *request.mutable_chat();
  for (const auto& [role, content] : messages) {
    v1::ChatMessage& message = *chat.add_messages();
    message.set_role(role);
    message.set_content(content);
  }
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
      {"", [](R& r, S&) { r.mutable_token_ids()->mutable_ids()->Resize(20, 1); }},
      {"token_ids has 21 tokens; at most 20 are allowed (--max-prompt-tokens)",
       [](R& r, S&) { r.mutable_token_ids()->mutable_ids()->Resize(21, 1); }},
      {"resume has 21 tokens; at most 20 are allowed (--max-prompt-tokens)",
       [](R& r, S& s) {
         s.set_max_tokens(100);
         r.mutable_resume()->mutable_ids()->Resize(21, 1);
       }},
      {"...\"; \"tiny\" is served here",
       [](R& r, S&) { r.set_model(std::string(100000, 'm')); }},
      {"cache_salt has 257 bytes; at most 256",
       [](R& r, S&) { r.set_cache_salt(std::string(257, 's')); }},
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
      {"request_id has the control character 0x0a", [](R& r, S&) { r.set_request_id("a\nb"); }},
      {"", [](R& r, S&) { r.set_request_id("\u00e9 /"); }},
      {"", [](R&, S& s) { s.set_n(3); }},
      {"n is 4; 1 to 3 are allowed (--max-n)", [](R&, S& s) { s.set_n(4); }},
      {"n is 0;", [](R&, S& s) { s.set_n(0); }},
      {"n is -1;", [](R&, S& s) { s.set_n(-1); }},
      {"", [](R&, S& s) { s.set_min_p(0); }},
      {"", [](R&, S& s) { s.set_min_p(1); }},
      {"min_p is 1.1; 0 to 1", [](R&, S& s) { s.set_min_p(1.1F); }},
      {"min_p is -0.1;", [](R&, S& s) { s.set_min_p(-0.1F); }},
      {"min_p is nan;", [](R&, S& s) { s.set_min_p(std::nanf("")); }},
      {"", [](R&, S& s) { s.set_presence_penalty(-2); }},
      {"", [](R&, S& s) { s.set_presence_penalty(2); }},
      {"presence_penalty is 2.1; -2 to 2", [](R&, S& s) { s.set_presence_penalty(2.1F); }},
      {"presence_penalty is nan;", [](R&, S& s) { s.set_presence_penalty(std::nanf("")); }},
      {"", [](R&, S& s) { s.set_frequency_penalty(-2); }},
      {"frequency_penalty is -2.1;", [](R&, S& s) { s.set_frequency_penalty(-2.1F); }},
      {"frequency_penalty is inf;", [](R&, S& s) { s.set_frequency_penalty(kInf); }},
      {"", [](R&, S& s) { s.set_repetition_penalty(10); }},
      {"", [](R&, S& s) { s.set_repetition_penalty(0.01F); }},
      {"repetition_penalty is 0;", [](R&, S& s) { s.set_repetition_penalty(0); }},
      {"repetition_penalty is 10.1;", [](R&, S& s) { s.set_repetition_penalty(10.1F); }},
      {"repetition_penalty is nan;", [](R&, S& s) { s.set_repetition_penalty(std::nanf("")); }},
      {"", [](R&, S& s) { s.set_min_tokens(16); }},  // as many as the default of max_tokens
      {"min_tokens is 17; at most max_tokens, 16", [](R&, S& s) { s.set_min_tokens(17); }},
      {"min_tokens is -1;", [](R&, S& s) { s.set_min_tokens(-1); }},
      {"",
       [](R&, S& s) {
         s.set_min_tokens(20);
         s.set_max_tokens(20);
       }},
      {"", [](R&, S& s) { s.set_logprobs(0); }},
      {"", [](R&, S& s) { s.set_logprobs(5); }},
      {"logprobs is 6; 0 to 5 are allowed (--max-logprobs)", [](R&, S& s) { s.set_logprobs(6); }},
      {"logprobs is -1;", [](R&, S& s) { s.set_logprobs(-1); }},
      {"", [](R&, S& s) { s.set_prompt_logprobs(5); }},
      {"prompt_logprobs is 6;", [](R&, S& s) { s.set_prompt_logprobs(6); }},
      {"prompt_logprobs is -1;", [](R&, S& s) { s.set_prompt_logprobs(-1); }},
      {"",
       [](R&, S& s) {
         (*s.mutable_logit_bias())[1] = -100;
         (*s.mutable_logit_bias())[2] = 100;
       }},
      {"3 logit_bias entries; at most 2",
       [](R&, S& s) {
         for (int i = 0; i < 3; ++i) (*s.mutable_logit_bias())[i] = 0;
       }},
      {"logit_bias[1] is 100.5; -100 to 100",
       [](R&, S& s) { (*s.mutable_logit_bias())[1] = 100.5F; }},
      {"logit_bias[1] is -inf;", [](R&, S& s) { (*s.mutable_logit_bias())[1] = -kInf; }},
      {"logit_bias[1] is nan;", [](R&, S& s) { (*s.mutable_logit_bias())[1] = std::nanf(""); }},
      {"",
       [](R&, S& s) {
         s.add_stop("1234");
         s.add_stop("1234");  // twice is as good as once
       }},
      {"3 stop strings; at most 2 are allowed (--max-stop-strings)",
       [](R&, S& s) {
         for (int i = 0; i < 3; ++i) s.add_stop("x");
       }},
      {"length of stop[0] is 0;", [](R&, S& s) { s.add_stop(""); }},
      {"length of stop[1] is 5; 1 to 4",
       [](R&, S& s) {
         s.add_stop("x");
         s.add_stop("12345");
       }},
      {"",
       [](R&, S& s) {
         s.add_bad_words("1234");
         s.add_bad_words_token_ids()->mutable_ids()->Resize(2, 1);
       }},
      {"3 bad_words and bad_words_token_ids; at most 2",
       [](R&, S& s) {
         s.add_bad_words("x");
         s.add_bad_words("y");
         s.add_bad_words_token_ids()->add_ids(1);
       }},
      {"length of bad_words[0] is 0;", [](R&, S& s) { s.add_bad_words(""); }},
      {"length of bad_words[0] is 5;", [](R&, S& s) { s.add_bad_words("12345"); }},
      {"length of bad_words_token_ids[0] is 0;", [](R&, S& s) { s.add_bad_words_token_ids(); }},
      {"length of bad_words_token_ids[0] is 3; 1 to 2",
       [](R&, S& s) { s.add_bad_words_token_ids()->mutable_ids()->Resize(3, 1); }},
      {"", [](R& r, S&) { r.mutable_resume()->mutable_ids()->Resize(15, 1); }},
      {"resume has 16 tokens; fewer than max_tokens, 16",
       [](R& r, S&) { r.mutable_resume()->mutable_ids()->Resize(16, 1); }},
      {"2 samples cannot be resumed",
       [](R& r, S& s) {
         r.mutable_resume()->add_ids(1);
         s.set_n(2);
       }},
      {"cannot be resumed",
       [](R& r, S& s) {
         r.set_resume_seq(1);
         s.set_n(2);
       }},
      {"", [](R& r, S&) { Say(r, {{v1::ROLE_USER, "1234"}, {v1::ROLE_ASSISTANT, "5678"}}); }},
      {"", [](R& r, S&) { Say(r, {{v1::ROLE_SYSTEM, ""}}); }},
      {"the chat has no messages", [](R& r, S&) { Say(r, {}); }},
      {"the chat has 3 messages; at most 2",
       [](R& r, S&) { Say(r, {{v1::ROLE_USER, ""}, {v1::ROLE_USER, ""}, {v1::ROLE_USER, ""}}); }},
      {"the chat has 9 bytes; at most 8",
       [](R& r, S&) { Say(r, {{v1::ROLE_USER, "1234"}, {v1::ROLE_ASSISTANT, "56789"}}); }},
      {"messages[1].role is 0;",
       [](R& r, S&) { Say(r, {{v1::ROLE_USER, ""}, {v1::ROLE_UNSPECIFIED, ""}}); }},
      {"messages[0].role is 9;", [](R& r, S&) { Say(r, {{static_cast<v1::Role>(9), ""}}); }},
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
  limits.text = false;
  EXPECT_TRUE(absl::IsInvalidArgument(ValidateRequest(Valid(), limits)));
  v1::GenerateRequest chat;
  Say(chat, {{v1::ROLE_USER, "x"}});
  EXPECT_TRUE(absl::IsInvalidArgument(ValidateRequest(chat, limits)));
  v1::GenerateRequest ids;
  ids.mutable_token_ids()->add_ids(1);
  EXPECT_TRUE(ValidateRequest(ids, limits).ok());
  for (const bool stop : {false, true}) {
    v1::GenerateRequest text = ids;
    *(stop ? text.mutable_sampling()->add_stop() : text.mutable_sampling()->add_bad_words()) = "x";
    EXPECT_THAT(std::string(ValidateRequest(text, limits).message()),
                HasSubstr("--skip-tokenizer-init"));
  }
}

TEST(ValidateTest, RefusesTokensOutsideTheVocabulary) {
  const auto message = [](absl::Span<const std::int32_t> prompt,
                          absl::Span<const std::int32_t> resume, const v1::SamplingParams& s) {
    return std::string(ValidateTokens(prompt, resume, s, 10).message());
  };
  const v1::SamplingParams none;
  EXPECT_TRUE(ValidateTokens({0, 9}, {9}, none, 10).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ValidateTokens({}, {}, none, 10)));
  EXPECT_THAT(message({0, 10}, {}, none), HasSubstr("prompt_token_ids[1] is 10; ids from 0 to 9"));
  EXPECT_THAT(message({0, -1}, {}, none), HasSubstr("prompt_token_ids[1] is -1"));
  EXPECT_THAT(message({0}, {3, 10}, none), HasSubstr("resume[1] is 10"));
  v1::SamplingParams sampling;
  sampling.add_stop_token_ids(10);
  EXPECT_THAT(message({0}, {}, sampling), HasSubstr("stop_token_ids[0] is 10"));
  sampling.Clear();
  sampling.mutable_allowed_token_ids()->Resize(10, 9);
  EXPECT_TRUE(ValidateTokens({0}, {}, sampling, 10).ok());  // twice is as good as once
  sampling.add_allowed_token_ids(9);
  EXPECT_THAT(message({0}, {}, sampling), HasSubstr("11 allowed_token_ids"));
  sampling.Clear();
  sampling.add_allowed_token_ids(-1);
  EXPECT_THAT(message({0}, {}, sampling), HasSubstr("allowed_token_ids[0] is -1"));
  sampling.Clear();
  (*sampling.mutable_logit_bias())[10] = 1;
  EXPECT_THAT(message({0}, {}, sampling), HasSubstr("logit_bias has id 10"));
  sampling.Clear();
  sampling.add_bad_words_token_ids()->add_ids(10);
  EXPECT_THAT(message({0}, {}, sampling), HasSubstr("bad_words_token_ids[0][0] is 10"));
}

TEST(ValidateTest, KeepsRoomForOneTokenBehindThePrompt) {
  EXPECT_TRUE(ValidatePromptLength(31, 32).ok());
  const absl::Status status = ValidatePromptLength(32, 32);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("32 tokens; at most 31"));
}

}  // namespace
}  // namespace weft
