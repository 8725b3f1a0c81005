#include "worker/group/communicator.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/rank_processes.h"

namespace weft {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

TEST(CommunicatorTest, EveryCollectiveEqualsBruteForce) {
  for (int n = 1; n <= 5; ++n) {
    for (std::uint64_t seed : {1, 2}) {
      EXPECT_THAT(RunOnThreads(n, [&](RankContext& c) { return CheckCollectives(c, seed); }),
                  Each(IsEmpty()));
    }
  }
}

}  // namespace
}  // namespace weft
