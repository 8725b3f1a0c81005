// The parent never uses UCX: see RankProcesses.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/rank_processes.h"
#include "worker/group/communicator.h"

namespace weft {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

TEST(UcxFabricTest, EveryCollectiveEqualsBruteForce) {
  for (int n = 2; n <= 4; ++n) {
    RankProcesses ranks(n, [](RankContext& c) { return CheckCollectives(c, 3); });
    EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
  }
}

}  // namespace
}  // namespace weft
