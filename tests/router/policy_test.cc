#include "router/policy.h"

#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

GroupLoad Ready(std::int64_t requests, std::int64_t free_blocks = 10,
                std::int64_t max_prompt_tokens = 100) {
  return {.ready = true,
          .max_prompt_tokens = max_prompt_tokens,
          .requests = requests,
          .free_blocks = free_blocks};
}

TEST(PolicyTest, PicksTheGroupWithTheFewestRequests) {
  EXPECT_EQ(PickGroup({Ready(3), Ready(1), Ready(2)}, 10), 1U);
}

TEST(PolicyTest, PicksMoreFreeBlocksAndThenTheFirstBetweenEquals) {
  EXPECT_EQ(PickGroup({Ready(1, 5), Ready(1, 9), Ready(1, 9)}, 10), 1U);
}

TEST(PolicyTest, LeavesOutGroupsThatAreNotReady) {
  GroupLoad idle = Ready(0);
  idle.ready = false;
  EXPECT_EQ(PickGroup({idle, Ready(7)}, 10), 1U);
  EXPECT_EQ(PickGroup({idle}, 10), std::nullopt);
  EXPECT_EQ(PickGroup({}, 10), std::nullopt);
}

TEST(PolicyTest, LeavesOutGroupsThatThePromptDoesNotFit) {
  const std::vector<GroupLoad> groups = {Ready(0, 10, 20), Ready(5, 10, 21)};
  EXPECT_EQ(PickGroup(groups, 20), 0U);
  EXPECT_EQ(PickGroup(groups, 21), 1U);
  EXPECT_EQ(PickGroup(groups, 22), std::nullopt);
}

}  // namespace
}  // namespace weft
