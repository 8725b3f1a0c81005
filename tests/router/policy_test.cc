#include "router/policy.h"

#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "router/seldom.h"

namespace weft {
namespace {

GroupLoad Ready(std::int64_t requests, std::int64_t free_blocks = 10,
                std::int64_t max_prompt_tokens = 100) {
  return {.ready = true,
          .max_prompt_tokens = max_prompt_tokens,
          .requests = requests,
          .free_blocks = free_blocks};
}

GroupLoad Caches(std::int64_t cached_tokens, std::int64_t requests,
                 std::int64_t prefill_tokens = 0) {
  GroupLoad load = Ready(requests, 10, 1 << 20);
  load.cached_tokens = cached_tokens;
  load.prefill_tokens = prefill_tokens;
  return load;
}

constexpr RoutingPolicy kAll[] = {RoutingPolicy::kPrefixAware, RoutingPolicy::kLeastLoaded,
                                  RoutingPolicy::kRoundRobin, RoutingPolicy::kRandom};

TEST(PolicyTest, LeastLoadedPicksTheGroupWithTheFewestRequests) {
  Policy policy(RoutingPolicy::kLeastLoaded);
  EXPECT_EQ(policy.Pick({Ready(3), Ready(1), Ready(2)}, 10), 1U);
  EXPECT_EQ(policy.Pick({Caches(1000, 3), Caches(0, 2)}, 1000), 1U);
}

TEST(PolicyTest, BetweenEqualsMoreFreeBlocksAndThenTheFirst) {
  for (const auto kind : {RoutingPolicy::kPrefixAware, RoutingPolicy::kLeastLoaded}) {
    Policy policy(kind);
    EXPECT_EQ(policy.Pick({Ready(1, 5), Ready(1, 9), Ready(1, 9)}, 10), 1U);
  }
}

TEST(PolicyTest, EveryPolicyLeavesOutGroupsThatAreNotReady) {
  GroupLoad idle = Ready(0);
  idle.ready = false;
  for (const RoutingPolicy kind : kAll) {
    Policy policy(kind);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(policy.Pick({idle, Ready(7), idle}, 10), 1U);
    EXPECT_EQ(policy.Pick({idle}, 10), std::nullopt);
    EXPECT_EQ(policy.Pick({}, 10), std::nullopt);
  }
}

TEST(PolicyTest, EveryPolicyLeavesOutGroupsThatThePromptDoesNotFit) {
  const std::vector<GroupLoad> groups = {Ready(0, 10, 20), Ready(5, 10, 21)};
  for (const RoutingPolicy kind : kAll) {
    Policy policy(kind);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(policy.Pick(groups, 21), 1U);
    EXPECT_EQ(policy.Pick(groups, 22), std::nullopt);
  }
  EXPECT_EQ(Policy(RoutingPolicy::kPrefixAware).Pick(groups, 20), 0U);
}

TEST(PolicyTest, PrefixAwareGoesWhereThePrefixIsUntilTheQueueThereCostsMore) {
  Policy policy(RoutingPolicy::kPrefixAware, /*request_tokens=*/100);
  EXPECT_EQ(policy.Pick({Caches(0, 0), Caches(512, 5)}, 1000), 1U);
  EXPECT_EQ(policy.Pick({Caches(0, 0), Caches(512, 6)}, 1000), 0U);
  // Prompts that wait there to be computed are part of the queue.
  EXPECT_EQ(policy.Pick({Caches(0, 0), Caches(512, 1, 411)}, 1000), 1U);
  EXPECT_EQ(policy.Pick({Caches(0, 0), Caches(512, 1, 413)}, 1000), 0U);
  // Of two that cache a part, the longer one.
  EXPECT_EQ(policy.Pick({Caches(256, 0), Caches(512, 0), Caches(128, 0)}, 1000), 1U);
}

TEST(PolicyTest, RoundRobinTakesTurnsAmongThoseThatAreReady) {
  Policy policy(RoutingPolicy::kRoundRobin);
  GroupLoad down = Ready(0);
  down.ready = false;
  const std::vector<GroupLoad> groups = {Ready(9), down, Ready(0), Ready(3)};
  std::vector<std::size_t> picked;
  for (int i = 0; i < 6; ++i) picked.push_back(*policy.Pick(groups, 10));
  EXPECT_EQ(picked, (std::vector<std::size_t>{0, 2, 3, 0, 2, 3}));
}

TEST(PolicyTest, RandomTakesEveryGroupAboutEquallyOften) {
  Policy policy(RoutingPolicy::kRandom, 0, /*seed=*/7);
  std::map<std::size_t, int> picked;
  for (int i = 0; i < 3000; ++i) ++picked[*policy.Pick({Ready(9), Ready(0), Ready(3)}, 10)];
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(picked[i], 1000, 130);  // 5 sigma
}

TEST(PolicyTest, NamesAreThoseOfTheFlag) {
  EXPECT_EQ(ParseRoutingPolicy("prefix-aware"), RoutingPolicy::kPrefixAware);
  EXPECT_EQ(ParseRoutingPolicy("least-loaded"), RoutingPolicy::kLeastLoaded);
  EXPECT_EQ(ParseRoutingPolicy("round-robin"), RoutingPolicy::kRoundRobin);
  EXPECT_EQ(ParseRoutingPolicy("random"), RoutingPolicy::kRandom);
  EXPECT_EQ(ParseRoutingPolicy("fastest"), std::nullopt);
}

TEST(SeldomTest, LinesThatTakeTurnsDoNotFillTheLog) {
  Seldom seldom;
  Seldom::Clock::time_point now{};
  EXPECT_TRUE(seldom.Allows("a", now));
  int lines = 0;
  for (int second = 0; second < 3600; ++second) {
    now += std::chrono::seconds(1);
    lines += seldom.Allows(second % 2 == 0 ? "a" : "b", now);
  }
  EXPECT_GE(lines, 50);
  EXPECT_LE(lines, 60);
  Seldom alone;
  lines = 0;
  for (int second = 0; second < 3600; ++second) {
    lines += alone.Allows("a", now + std::chrono::seconds(second));
  }
  EXPECT_EQ(lines, 1);
}

}  // namespace
}  // namespace weft
