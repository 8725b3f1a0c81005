#include "worker/generate_request.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int32_t kVocab = 100;
constexpr std::int32_t kEos[] = {2, 3};
constexpr WorkerLimits kLimits = {.max_logprobs = 5,
                                  .max_stop_token_ids = 3,
                                  .max_logit_bias = 3,
                                  .max_allowed_token_ids = 4,
                                  .max_bad_word_sequences = 2,
                                  .max_bad_word_sequence_tokens = 3};

v1::WorkerGenerateRequest Request() {
  v1::WorkerGenerateRequest request;
  request.add_prompt_token_ids(1);
  request.mutable_sampling()->set_seed(7);
  return request;
}

absl::StatusOr<EngineRequest> Convert(const v1::WorkerGenerateRequest& request,
                                      const WorkerLimits& limits = kLimits) {
  return ToEngineRequest(request, {.vocab_size = kVocab, .eos_token_ids = kEos}, limits,
                         absl::InfiniteFuture());
}

// As the leader takes it: converted, then checked.
absl::Status Check(const v1::WorkerGenerateRequest& request, const WorkerLimits& limits = kLimits) {
  const absl::StatusOr<EngineRequest> converted = Convert(request, limits);
  if (!converted.ok()) return converted.status();
  return CheckRequest(*converted, {.max_model_len = 1000, .vocab_size = kVocab});
}

TEST(GenerateRequestTest, EveryFieldReachesTheEngine) {
  v1::WorkerGenerateRequest request = Request();
  request.add_prompt_token_ids(9);
  request.add_resume_token_ids(8);
  request.set_priority(-4);
  request.set_cache_salt("a tenant's");
  v1::SamplingParams& in = *request.mutable_sampling();
  in.set_max_tokens(33);
  in.set_temperature(0.5F);
  in.set_top_p(0.25F);
  in.set_top_k(12);
  in.add_stop_token_ids(40);
  in.set_ignore_eos(true);
  in.set_min_p(0.125F);
  in.set_presence_penalty(-1);
  in.set_frequency_penalty(0.5F);
  in.set_repetition_penalty(1.5F);
  in.set_min_tokens(4);
  (*in.mutable_logit_bias())[17] = -2.5F;
  in.add_allowed_token_ids(17);
  in.add_allowed_token_ids(18);
  in.add_bad_words_token_ids()->add_ids(5);
  in.mutable_bad_words_token_ids(0)->add_ids(6);
  in.set_logprobs(0);
  in.set_prompt_logprobs(5);
  const absl::Time deadline = absl::FromUnixSeconds(1000);
  const absl::StatusOr<EngineRequest> out =
      ToEngineRequest(request, {.vocab_size = kVocab, .eos_token_ids = kEos}, kLimits, deadline);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(out->prompt_token_ids, ElementsAre(1, 9));
  EXPECT_THAT(out->resume_token_ids, ElementsAre(8));
  EXPECT_EQ(out->priority, -4);
  EXPECT_EQ(out->cache_salt, "a tenant's");
  EXPECT_EQ(out->deadline, deadline);
  EXPECT_EQ(out->max_tokens, 33);
  EXPECT_THAT(out->stop_token_ids, ElementsAre(40));
  EXPECT_THAT(out->eos_token_ids, ElementsAre(2, 3));
  EXPECT_TRUE(out->ignore_eos);
  EXPECT_EQ(out->sampling,
            (SamplingParams{
                .temperature = 0.5F, .top_p = 0.25F, .top_k = 12, .min_p = 0.125F, .seed = 7}));
  const LogitsParams& logits = *out->logits;
  EXPECT_EQ(logits.presence_penalty, -1);
  EXPECT_EQ(logits.frequency_penalty, 0.5F);
  EXPECT_EQ(logits.repetition_penalty, 1.5F);
  EXPECT_EQ(logits.min_tokens, 4);
  EXPECT_THAT(logits.ending_tokens, ElementsAre(2, 3, 40));
  EXPECT_THAT(logits.logit_bias, ElementsAre(std::pair(17, -2.5F)));
  EXPECT_THAT(logits.allowed_token_ids, ElementsAre(17, 18));
  EXPECT_THAT(logits.bad_words, ElementsAre(ElementsAre(5, 6)));
  EXPECT_EQ(logits.logprobs, 0);
  EXPECT_EQ(logits.prompt_logprobs, 5);
}

TEST(GenerateRequestTest, NeutralValuesCostNothing) {
  v1::WorkerGenerateRequest request = Request();
  v1::SamplingParams& in = *request.mutable_sampling();
  in.set_min_p(0);
  in.set_presence_penalty(0);
  in.set_frequency_penalty(0);
  in.set_repetition_penalty(1);
  in.set_min_tokens(0);
  in.set_top_k(-1);
  const absl::StatusOr<EngineRequest> out = Convert(request);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->logits, nullptr);
  EXPECT_FALSE(out->sampling.NeedsWholeRow());
}

TEST(GenerateRequestTest, ASeedIsRequired) {
  v1::WorkerGenerateRequest request = Request();
  request.mutable_sampling()->clear_seed();
  EXPECT_THAT(std::string(Check(request).message()), HasSubstr("sampling.seed is missing"));
}

// What is set to each of `good` passes, to each of `bad` is INVALID_ARGUMENT and names the field.
struct Edge {
  const char* says;
  std::function<void(v1::SamplingParams&, double)> set;
  std::vector<double> good;
  std::vector<double> bad;
};

const double kNaN = std::nan("");
const double kInfinity = std::numeric_limits<double>::infinity();

TEST(GenerateRequestTest, ValuesHoldAtTheirEdges) {
  const Edge edges[] = {
      {"max_tokens", [](auto& in, double v) { in.set_max_tokens(v); }, {1, 2147483647}, {0, -1}},
      {"temperature",
       [](auto& in, double v) { in.set_temperature(v); },
       {0, 100},
       {-0.01, kNaN, kInfinity}},
      {"top_p", [](auto& in, double v) { in.set_top_p(v); }, {0.001, 1}, {0, 1.001, kNaN}},
      {"top_k", [](auto& in, double v) { in.set_top_k(v); }, {-1, 0, 1, 1000}, {-2}},
      {"min_p", [](auto& in, double v) { in.set_min_p(v); }, {0, 1}, {-0.001, 1.001, kNaN}},
      {"presence_penalty",
       [](auto& in, double v) { in.set_presence_penalty(v); },
       {-2, 2},
       {-2.01, 2.01, kNaN, kInfinity}},
      {"frequency_penalty",
       [](auto& in, double v) { in.set_frequency_penalty(v); },
       {-2, 2},
       {-2.01, 2.01, kNaN, -kInfinity}},
      {"repetition_penalty",
       [](auto& in, double v) { in.set_repetition_penalty(v); },
       {0.001, 10},
       {0, -1, 10.01, kNaN, kInfinity}},
      {"min_tokens",
       [](auto& in, double v) {
         in.set_min_tokens(v);
         in.set_max_tokens(9);
       },
       {0, 9},
       {-1, 10}},
      {"logprobs is", [](auto& in, double v) { in.set_logprobs(v); }, {0, 5}, {-1, 6}},
      {"prompt_logprobs is",
       [](auto& in, double v) { in.set_prompt_logprobs(v); },
       {0, 5},
       {-1, 6}},
      {"logit_bias of token 4",
       [](auto& in, double v) { (*in.mutable_logit_bias())[4] = v; },
       {-100, 100},
       {-100.1, 100.1, kNaN, kInfinity}},
      {"logit_bias is for token",
       [](auto& in, double v) { (*in.mutable_logit_bias())[v] = 1; },
       {0, 99},
       {-1, 100}},
      {"stop_token_ids[0]",
       [](auto& in, double v) { in.add_stop_token_ids(v); },
       {0, 99},
       {-1, 100}},
      {"allowed_token_ids[1]",
       [](auto& in, double v) {
         in.add_allowed_token_ids(1);
         in.add_allowed_token_ids(v);
       },
       {0, 99},
       {-1, 100}},
      {"bad_words_token_ids[0][1]",
       [](auto& in, double v) {
         in.add_bad_words_token_ids()->add_ids(1);
         in.mutable_bad_words_token_ids(0)->add_ids(v);
       },
       {0, 99},
       {-1, 100}}};
  for (const Edge& edge : edges) {
    for (double value : edge.good) {
      v1::WorkerGenerateRequest request = Request();
      edge.set(*request.mutable_sampling(), value);
      EXPECT_TRUE(Check(request).ok()) << edge.says << " " << value << ": " << Check(request);
    }
    for (double value : edge.bad) {
      v1::WorkerGenerateRequest request = Request();
      edge.set(*request.mutable_sampling(), value);
      EXPECT_EQ(Check(request).code(), absl::StatusCode::kInvalidArgument) << edge.says << value;
      EXPECT_THAT(std::string(Check(request).message()), HasSubstr(edge.says));
    }
  }
}

TEST(GenerateRequestTest, CountsHoldAtTheirLimits) {
  const Edge edges[] = {
      {"stop_token_ids has 4 entries; at most 3 are allowed (--max-stop-token-ids)",
       [](auto& in, double v) { in.mutable_stop_token_ids()->Resize(v, 1); },
       {0, 3},
       {4}},
      {"logit_bias has 4 entries; at most 3 are allowed (--max-logit-bias)",
       [](auto& in, double v) {
         for (int i = 0; i < v; ++i) (*in.mutable_logit_bias())[i] = 1;
       },
       {0, 3},
       {4}},
      {"allowed_token_ids has 5 entries; at most 4 are allowed (--max-allowed-token-ids)",
       [](auto& in, double v) { in.mutable_allowed_token_ids()->Resize(v, 1); },
       {0, 4},
       {5}},
      {"bad_words_token_ids has 3 entries; at most 2 are allowed (--max-bad-word-sequences)",
       [](auto& in, double v) {
         for (int i = 0; i < v; ++i) in.add_bad_words_token_ids()->add_ids(1);
       },
       {0, 2},
       {3}},
      {"bad_words_token_ids[0] has 4 entries; at most 3 are allowed "
       "(--max-bad-word-sequence-tokens)",
       [](auto& in, double v) { in.add_bad_words_token_ids()->mutable_ids()->Resize(v, 1); },
       {1, 3},
       {4}},
      {"bad_words_token_ids[0] is empty",
       [](auto& in, double v) { in.add_bad_words_token_ids()->mutable_ids()->Resize(v, 1); },
       {1},
       {0}}};
  for (const Edge& edge : edges) {
    for (double value : edge.good) {
      v1::WorkerGenerateRequest request = Request();
      edge.set(*request.mutable_sampling(), value);
      EXPECT_TRUE(Check(request).ok()) << edge.says << " " << value << ": " << Check(request);
    }
    for (double value : edge.bad) {
      v1::WorkerGenerateRequest request = Request();
      edge.set(*request.mutable_sampling(), value);
      EXPECT_EQ(Check(request).code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(Check(request).message()), HasSubstr(edge.says));
    }
  }
  v1::WorkerGenerateRequest request = Request();
  request.set_request_id(std::string(256, 'x'));
  EXPECT_TRUE(Check(request).ok());
  request.set_request_id(std::string(257, 'x'));
  EXPECT_THAT(std::string(Check(request).message()), HasSubstr("request_id has 257 bytes"));
}

TEST(GenerateRequestTest, MinusOneIsTheVocabularyWhereTheLimitIs) {
  v1::WorkerGenerateRequest request = Request();
  WorkerLimits limits = kLimits;
  limits.max_logprobs = -1;
  request.mutable_sampling()->set_logprobs(-1);
  request.mutable_sampling()->set_prompt_logprobs(kVocab);
  const absl::StatusOr<EngineRequest> out = Convert(request, limits);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->logits->logprobs, kVocab);
  EXPECT_EQ(out->logits->prompt_logprobs, kVocab);
  for (std::int32_t bad : {-2, kVocab + 1}) {
    request.mutable_sampling()->set_logprobs(bad);
    EXPECT_THAT(std::string(Check(request, limits).message()),
                HasSubstr("allowed is -1 to 100 (--max-logprobs)"));
  }
}

TEST(GenerateRequestTest, TokensThatMayOnlyEndAreNotEnoughForMinTokens) {
  v1::WorkerGenerateRequest request = Request();
  v1::SamplingParams& in = *request.mutable_sampling();
  in.set_min_tokens(1);
  in.add_allowed_token_ids(2);
  in.add_allowed_token_ids(40);
  EXPECT_TRUE(Check(request).ok());
  in.add_stop_token_ids(40);
  EXPECT_EQ(Check(request).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Check(request).message()),
              HasSubstr("allowed_token_ids has only tokens"));
  in.set_min_tokens(0);
  EXPECT_TRUE(Check(request).ok());
}

TokenEvent Event(std::int32_t token_id) {
  TokenEvent event{.token_id = token_id};
  event.logprobs = PositionLogprobs{.token = {.token_id = token_id, .logprob = -1, .rank = 2},
                                    .top = {{5, -0.5F, 1}, {token_id, -1, 2}}};
  return event;
}

TEST(GenerateResponseTest, SaysWhatHappened) {
  TokenEvent event = Event(9);
  event.prompt_logprobs = {{.token = {.token_id = 1, .logprob = -3, .rank = 40}}};
  event.finish = FinishReason::kEos;
  v1::WorkerGenerateResponse response = ToResponse(event);
  EXPECT_THAT(response.token_ids(), ElementsAre(9));
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_TRUE(response.ended_by_eos());
  ASSERT_EQ(response.logprobs_size(), 1);
  EXPECT_EQ(response.logprobs(0).token().rank(), 2);
  ASSERT_EQ(response.logprobs(0).top_size(), 2);
  EXPECT_EQ(response.logprobs(0).top(0).token_id(), 5);
  EXPECT_EQ(response.logprobs(0).top(0).logprob(), -0.5F);
  ASSERT_EQ(response.prompt_logprobs_size(), 1);
  EXPECT_EQ(response.prompt_logprobs(0).token().token_id(), 1);

  event = {.token_id = 9, .finish = FinishReason::kStopToken};
  response = ToResponse(event);
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_FALSE(response.ended_by_eos());
  event.finish = FinishReason::kLength;
  EXPECT_EQ(ToResponse(event).finish_reason(), v1::FINISH_REASON_LENGTH);
  event.finish = FinishReason::kNone;
  EXPECT_EQ(ToResponse(event).finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
}

TEST(GenerateResponseTest, MergingKeepsEverythingInOrder) {
  v1::WorkerGenerateResponse merged = ToResponse({});
  std::int64_t last_bytes = ResponseBytes(merged);
  for (int i = 0; i < 256; ++i) {
    TokenEvent event = Event(i);
    if (i == 255) event.finish = FinishReason::kEos;
    v1::WorkerGenerateResponse next = ToResponse(event);
    ASSERT_TRUE(MergeResponses(merged, next));
    EXPECT_GT(ResponseBytes(merged), last_bytes);
    last_bytes = ResponseBytes(merged);
  }
  ASSERT_EQ(merged.token_ids_size(), 256);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(merged.token_ids(i), i);
    EXPECT_EQ(merged.logprobs(i).token().token_id(), i);
  }
  EXPECT_TRUE(merged.ended_by_eos());
  EXPECT_EQ(merged.finish_reason(), v1::FINISH_REASON_STOP);
  // More waits in another message: each merge looks at all of the one before.
  v1::WorkerGenerateResponse next = ToResponse(Event(1));
  EXPECT_FALSE(MergeResponses(merged, next));
  EXPECT_EQ(next.token_ids_size(), 1);
}

}  // namespace
}  // namespace weft
