#include "client/bench_stats.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace weft {
namespace {

using ::testing::HasSubstr;

absl::Duration Ms(double ms) { return absl::Milliseconds(ms); }

TEST(PercentileTest, InterpolatesAsNumpyDoes) {
  // numpy.percentile([15, 20, 35, 40, 50], p)
  const std::vector<absl::Duration> times = {Ms(35), Ms(20), Ms(50), Ms(15), Ms(40)};
  EXPECT_EQ(Percentile(times, 0), Ms(15));
  EXPECT_EQ(Percentile(times, 40), Ms(29));
  EXPECT_EQ(Percentile(times, 50), Ms(35));
  EXPECT_EQ(Percentile(times, 100), Ms(50));
  EXPECT_NEAR(absl::ToDoubleMilliseconds(Percentile(times, 99)), 49.6, 1e-6);
  EXPECT_EQ(Percentile({Ms(7)}, 99), Ms(7));
  EXPECT_EQ(Percentile({}, 99), absl::ZeroDuration());
}

TEST(PercentileTest, LiesBetweenTheTwoThatCountingFinds) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<absl::Duration> times(1 + random() % 50);
    for (absl::Duration& time : times) time = Ms(static_cast<double>(random() % 1000));
    const double percent = static_cast<double>(random() % 101);
    const absl::Duration value = Percentile(times, percent);
    const auto below = std::count_if(times.begin(), times.end(), [&](auto t) { return t < value; });
    const auto upto = std::count_if(times.begin(), times.end(), [&](auto t) { return t <= value; });
    const double rank = percent / 100 * static_cast<double>(times.size() - 1);
    EXPECT_LE(static_cast<double>(below), rank + 1) << "round " << round;
    EXPECT_GE(static_cast<double>(upto), rank - 1e-9) << "round " << round;
  }
}

TEST(SummarizeTest, CountsTokensAndTimesOfCompletedRequestsOnly) {
  const std::vector<BenchSample> samples = {
      {.ok = true,
       .input_tokens = 10,
       .output_tokens = 3,
       .cached_tokens = 8,
       .time_to_first_token = Ms(100),
       .latency = Ms(160),
       .inter_token = {Ms(20), Ms(40)}},
      {.ok = true,
       .input_tokens = 20,
       .output_tokens = 1,
       .time_to_first_token = Ms(300),
       .latency = Ms(300)},
      {.ok = false, .input_tokens = 99, .output_tokens = 99, .time_to_first_token = Ms(9999)}};
  const BenchSummary summary = Summarize(samples, absl::Seconds(2));
  EXPECT_EQ(summary.completed, 2);
  EXPECT_EQ(summary.failed, 1);
  EXPECT_EQ(summary.input_tokens, 30);
  EXPECT_EQ(summary.output_tokens, 4);
  EXPECT_EQ(summary.cached_tokens, 8);
  EXPECT_DOUBLE_EQ(summary.uncached_input_throughput(), 11);
  EXPECT_DOUBLE_EQ(summary.request_throughput(), 1);
  EXPECT_DOUBLE_EQ(summary.output_throughput(), 2);
  EXPECT_DOUBLE_EQ(summary.total_token_throughput(), 17);
  EXPECT_EQ(summary.ttft.mean, Ms(200));
  EXPECT_EQ(summary.ttft.median, Ms(200));
  EXPECT_EQ(summary.tpot.mean, Ms(30)) << "(160 - 100) / (3 - 1); one token has none";
  EXPECT_EQ(summary.itl.mean, Ms(30));
  EXPECT_EQ(summary.e2el.mean, Ms(230));
  EXPECT_NEAR(absl::ToDoubleMilliseconds(summary.e2el.p99), 298.6, 1e-6);
}

TEST(SummarizeTest, NothingCompletedIsAllZero) {
  const BenchSummary summary = Summarize({}, absl::ZeroDuration());
  EXPECT_EQ(summary.request_throughput(), 0);
  EXPECT_EQ(summary.ttft.p99, absl::ZeroDuration());
  EXPECT_THAT(FormatBenchTable(summary, {}, {}),
              HasSubstr("Mean TTFT (ms):                          0.00"));
}

TEST(FormatBenchTableTest, IsTheTableOfVllmBenchServeAndTheKvCache) {
  BenchSummary summary = {.completed = 10,
                          .failed = 0,
                          .duration = absl::Milliseconds(5780),
                          .input_tokens = 1369,
                          .output_tokens = 2212,
                          .cached_tokens = 1000};
  summary.ttft = {.mean = Ms(71.54), .median = Ms(73.88), .p99 = Ms(79.49)};
  EXPECT_EQ(FormatBenchTable(summary, {.max_concurrency = 4, .request_rate = 10},
                             {.evictions = 7, .preemptions = 2, .peak_running = 5}),
            "============ Serving Benchmark Result ============\n"
            "Successful requests:                     10        \n"
            "Failed requests:                         0         \n"
            "Maximum request concurrency:             4         \n"
            "Request rate configured (RPS):           10.00     \n"
            "Benchmark duration (s):                  5.78      \n"
            "Total input tokens:                      1369      \n"
            "Total generated tokens:                  2212      \n"
            "Request throughput (req/s):              1.73      \n"
            "Output token throughput (tok/s):         382.70    \n"
            "Total Token throughput (tok/s):          619.55    \n"
            "---------------Time to First Token----------------\n"
            "Mean TTFT (ms):                          71.54     \n"
            "Median TTFT (ms):                        73.88     \n"
            "P99 TTFT (ms):                           79.49     \n"
            "-----Time per Output Token (excl. 1st token)------\n"
            "Mean TPOT (ms):                          0.00      \n"
            "Median TPOT (ms):                        0.00      \n"
            "P99 TPOT (ms):                           0.00      \n"
            "---------------Inter-token Latency----------------\n"
            "Mean ITL (ms):                           0.00      \n"
            "Median ITL (ms):                         0.00      \n"
            "P99 ITL (ms):                            0.00      \n"
            "----------------End-to-end Latency----------------\n"
            "Mean E2EL (ms):                          0.00      \n"
            "Median E2EL (ms):                        0.00      \n"
            "P99 E2EL (ms):                           0.00      \n"
            "---------------------KV Cache---------------------\n"
            "Uncached input throughput (tok/s):       63.84     \n"
            "Prefix cache hit ratio (%):              73.05     \n"
            "Evicted KV blocks:                       7         \n"
            "Preemptions:                             2         \n"
            "Peak running requests (since start):     5         \n"
            "==================================================\n");
}

TEST(BenchToJsonTest, HasTheNamesOfVllmsResults) {
  BenchSummary summary = {.completed = 3,
                          .failed = 1,
                          .duration = absl::Seconds(2),
                          .input_tokens = 100,
                          .output_tokens = 8,
                          .cached_tokens = 90};
  summary.itl.p99 = Ms(12.5);
  const auto json =
      nlohmann::json::parse(BenchToJson(summary, {.burstiness = 0.5}, {.peak_running = 6}));
  EXPECT_EQ(json["duration"], 2);
  EXPECT_EQ(json["num_prompts"], 4);
  EXPECT_EQ(json["completed"], 3);
  EXPECT_EQ(json["output_throughput"], 4);
  EXPECT_EQ(json["p99_itl_ms"], 12.5);
  EXPECT_EQ(json["uncached_input_throughput"], 5);
  EXPECT_EQ(json["prefix_cache_hit_ratio"], 0.9);
  EXPECT_EQ(json["peak_running"], 6);
  EXPECT_EQ(json["mean_e2el_ms"], 0);
  EXPECT_EQ(json["request_rate"], "inf");
  EXPECT_EQ(json["burstiness"], 0.5);
  EXPECT_TRUE(json["max_concurrency"].is_null());
}

}  // namespace
}  // namespace weft
