#include "worker/leader_metrics.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kPerRequest[] = {
    "weft_e2e_request_latency_seconds",  "weft_request_queue_time_seconds",
    "weft_request_prefill_time_seconds", "weft_request_decode_time_seconds",
    "weft_request_prompt_tokens",        "weft_request_generation_tokens"};

std::string Sum(std::string name) { return name + "_sum{model_name=\"m\"} "; }
std::string Count(std::string name) { return name + "_count{model_name=\"m\"} "; }

class LeaderMetricsTest : public ::testing::Test {
 protected:
  absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

  MetricRegistry registry_{"m"};
  LeaderMetrics metrics_{registry_};
};

TEST_F(LeaderMetricsTest, TimesOfARequestAddUpToItsLatency) {
  RequestTimes request = {.arrival = At(100), .num_prompt_tokens = 7};
  metrics_.OnToken(request, 0, At(106));
  metrics_.OnToken(request, 1, At(107));
  metrics_.OnToken(request, 2, At(110));
  metrics_.OnEnd(request, At(102), FinishReason::kLength, At(110));
  const std::string text = registry_.Scrape();
  EXPECT_THAT(text, HasSubstr(Sum("weft_e2e_request_latency_seconds") + "10\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_queue_time_seconds") + "2\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_prefill_time_seconds") + "4\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_decode_time_seconds") + "4\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_time_to_first_token_seconds") + "6\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_inter_token_latency_seconds") + "4\n"));
  EXPECT_THAT(text, HasSubstr(Count("weft_inter_token_latency_seconds") + "2\n"));
  // (E2E - TTFT) / (n - 1)
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_time_per_output_token_seconds") + "2\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_prompt_tokens") + "7\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_generation_tokens") + "3\n"));
}

// A group that goes on with what another has begun: its client has had the first token before.
TEST_F(LeaderMetricsTest, TheFirstTokenOfARequestIsTimedWhereItWasToldFirst) {
  RequestTimes request = {.arrival = At(100), .num_prompt_tokens = 7};
  metrics_.OnToken(request, 1, At(106));
  metrics_.OnToken(request, 2, At(107));
  metrics_.OnEnd(request, At(102), FinishReason::kLength, At(107));
  const std::string text = registry_.Scrape();
  EXPECT_THAT(text, HasSubstr(Count("weft_time_to_first_token_seconds") + "0\n"));
  EXPECT_THAT(text, HasSubstr(Count("weft_inter_token_latency_seconds") + "1\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_prefill_time_seconds") + "4\n"));
}

TEST_F(LeaderMetricsTest, EveryEndCountsInEveryPerRequestSeries) {
  const FinishReason reasons[] = {FinishReason::kStopToken, FinishReason::kEos,
                                  FinishReason::kLength,    FinishReason::kAborted,
                                  FinishReason::kDeadline,  FinishReason::kError};
  for (const FinishReason reason : reasons) {
    metrics_.OnEnd({.arrival = At(0), .num_prompt_tokens = 1}, At(1), reason, At(2));
  }
  const std::string text = registry_.Scrape();
  for (const char* name : kPerRequest) EXPECT_THAT(text, HasSubstr(Count(name) + "6\n"));
  for (const char* line : {"stop\"} 2", "length\"} 1", "abort\"} 2", "error\"} 1"}) {
    EXPECT_THAT(text, HasSubstr(std::string("finished_reason=\"") + line));
  }
}

TEST_F(LeaderMetricsTest, OneThatNeverRanHasWaitedForAllItsLife) {
  metrics_.OnEnd({.arrival = At(0)}, absl::InfiniteFuture(), FinishReason::kAborted, At(5));
  const std::string text = registry_.Scrape();
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_queue_time_seconds") + "5\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_prefill_time_seconds") + "0\n"));
  EXPECT_THAT(text, HasSubstr(Sum("weft_request_decode_time_seconds") + "0\n"));
  EXPECT_THAT(text, HasSubstr(Count("weft_time_to_first_token_seconds") + "0\n"));
}

}  // namespace
}  // namespace weft
