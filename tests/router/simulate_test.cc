#include "router/simulate.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

// Two groups that compute 100 tokens a second and then say a token a second; blocks of 10 tokens.
constexpr SimulatedGroups kGroups = {.count = 2,
                                     .num_blocks = 3,
                                     .block_size = 10,
                                     .prefill_tokens_per_second = 100,
                                     .seconds_per_token = 1};

std::vector<TraceRequest> Parsed(std::string_view text) {
  auto parsed = ParseTrace(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *std::move(parsed);
}

// By hand, with round-robin: A and C go to the first group, B and D to the second.
//   A arrives at 0: 30 tokens, first at 0.3, last at 2.3.
//   B at 0.1: nothing cached there, first at 0.4, last at 0.4.
//   C at 0.2: two blocks of A's, 10 tokens behind A: first at 0.4, last at 1.4.
//   D at 10: three blocks of B's, but the last token: first at 10.01, last at 10.01.
TEST(SimulateTest, RoundRobinByHand) {
  const auto trace = Parsed(
      R"({"timestamp": 0, "input_length": 30, "output_length": 3, "hash_ids": [1, 2, 3]}
{"timestamp": 100, "input_length": 30, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 200, "input_length": 30, "output_length": 2, "hash_ids": [1, 2, 4]}
{"timestamp": 10000, "input_length": 30, "output_length": 1, "hash_ids": [1, 2, 3]})");
  const SimulationResult r = Simulate(trace, kGroups, Policy(RoutingPolicy::kRoundRobin));
  EXPECT_NEAR(r.cached, (0 + 0 + 20 + 29) / 120.0, 1e-12);
  EXPECT_NEAR(r.ttft_p50, 0.3, 1e-9);  // of 0.01, 0.2, 0.3, 0.3
  EXPECT_NEAR(r.ttft_p99, 0.3, 1e-9);
  EXPECT_NEAR(r.latency_p99, 2.3, 1e-9);  // of 0.01, 0.3, 1.2, 2.3
  EXPECT_NEAR(r.latency_p50, 1.2, 1e-9);
  EXPECT_NEAR(r.busiest, 0.5, 1e-12);
}

// By hand: the first group gets A. B comes when A's blocks are known there, and goes after them;
// C of another prefix goes to the group that does nothing. D's prefix is where C was.
TEST(SimulateTest, PrefixAwareByHand) {
  const auto trace = Parsed(
      R"({"timestamp": 0, "input_length": 30, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 1000, "input_length": 30, "output_length": 11, "hash_ids": [1, 2, 5]}
{"timestamp": 2000, "input_length": 30, "output_length": 1, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 20, "output_length": 1, "hash_ids": [7, 8]})");
  const SimulationResult r = Simulate(trace, kGroups, Policy(RoutingPolicy::kPrefixAware, 5));
  EXPECT_NEAR(r.cached, (0 + 20 + 0 + 19) / 110.0, 1e-12);
  EXPECT_NEAR(r.busiest, 0.5, 1e-12);
  EXPECT_NEAR(r.latency_p99, 10.1, 1e-9);
}

TEST(SimulateTest, WhatARouterHasNotHeardOfDoesNotCount) {
  // The second comes before the first one's blocks are computed: both groups look equal to it but
  // for the queue, so it goes to the other.
  const auto trace = Parsed(
      R"({"timestamp": 0, "input_length": 30, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 100, "input_length": 30, "output_length": 1, "hash_ids": [1, 2, 3]})");
  EXPECT_EQ(Simulate(trace, kGroups, Policy(RoutingPolicy::kPrefixAware)).cached, 0);
}

TEST(SimulateTest, TheLeastRecentlyUsedBlocksGo) {
  // Three blocks fit: 9 replaces 1, which was used the longest time ago.
  SimulatedGroups one = kGroups;
  one.count = 1;
  const auto trace = Parsed(
      R"({"timestamp": 0, "input_length": 30, "output_length": 1, "hash_ids": [3, 2, 1]}
{"timestamp": 1000, "input_length": 20, "output_length": 1, "hash_ids": [3, 2]}
{"timestamp": 2000, "input_length": 10, "output_length": 1, "hash_ids": [9]}
{"timestamp": 3000, "input_length": 30, "output_length": 1, "hash_ids": [3, 2, 1]})");
  const SimulationResult r = Simulate(trace, one, Policy(RoutingPolicy::kLeastLoaded));
  EXPECT_NEAR(r.cached, (0 + 19 + 0 + 20) / 90.0, 1e-12);
}

TEST(SimulateTest, LinesInAnyOrderAndEmptyOnesAreTaken) {
  const auto trace = Parsed(
      "{\"timestamp\": 5, \"input_length\": 1, \"output_length\": 2, \"hash_ids\": []}\r\n\n"
      "{\"timestamp\": 3, \"input_length\": 7, \"output_length\": 1, \"hash_ids\": [4], \"x\": 1}");
  ASSERT_EQ(trace.size(), 2U);
  EXPECT_EQ(trace[0].arrival, 0.003);
  EXPECT_EQ(trace[0].blocks, std::vector<std::int64_t>{4});
  EXPECT_THAT(SimulationReport(trace, kGroups, 128), HasSubstr("round-robin"));
}

TEST(SimulateTest, WhatIsNoTraceIsRefusedWithItsLine) {
  const std::pair<const char*, const char*> kBad[] = {
      {"", "there is no request in it"},
      {"\n[]", "line 2: not a JSON object"},
      {"{\"timestamp\": 0", "line 1: "},
      {R"({"input_length": 1, "output_length": 1, "hash_ids": []})", "timestamp is missing"},
      {R"({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []})",
       "input_length is 0; a whole number from 1 on is needed"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1.5, "hash_ids": []})",
       "output_length is 1.5"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1})", "hash_ids is missing"},
      {R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]})",
       "hash_ids has \"a\""},
  };
  for (const auto& [text, message] : kBad) {
    EXPECT_THAT(std::string(ParseTrace(text).status().message()), HasSubstr(message)) << text;
  }
}

}  // namespace
}  // namespace weft
