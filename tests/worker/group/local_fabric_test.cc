#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/group/fabric_checks.h"
#include "tests/worker/group/rank_processes.h"
#include "worker/group/fabric.h"

namespace weft {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

TEST(LocalFabricTest, MessagesOfASenderArriveInOrderOverAllChannels) {
  for (std::uint64_t seed : {1, 2, 3}) {
    EXPECT_THAT(
        RunOnThreads(
            3, [&](RankContext& c) { return CheckOrder(c, seed, 60, std::int64_t{1} << 20); }),
        Each(IsEmpty()));
  }
}

TEST(LocalFabricTest, WakeEndsAWait) { EXPECT_THAT(RunOnThreads(1, CheckWake), Each(IsEmpty())); }

TEST(LocalFabricTest, DeadPeersThatAreDisconnectedLeaveNothingBehind) {
  EXPECT_EQ(CheckDisconnect([] { return MakeLocalFabric("kv"); }), "");
}

TEST(LocalFabricTest, RefusesWhatItMust) {
  EXPECT_THAT(RunOnThreads(1, CheckRefusals), Each(IsEmpty()));
}

TEST(LocalFabricTest, ADestroyedPeerIsDeadAndWakesUsAndItsLastWordsArrive) {
  std::unique_ptr<Fabric> fabric = MakeLocalFabric("a");
  std::unique_ptr<Fabric> other = MakeLocalFabric("b");
  const PeerId to_other = *fabric->Connect(other->LocalAddress(), 0);
  const PeerId to_us = *other->Connect(fabric->LocalAddress(), 5);
  std::uint32_t from = 0;
  fabric->Receive(Channel::kPlan,
                  [&](std::uint32_t tag, absl::Span<const std::byte>) { from = tag; });
  EXPECT_TRUE(fabric->PeerStatus(to_other).ok());

  const std::byte word{1};
  const absl::Span<const std::byte> span(&word, 1);
  std::thread killer([&] {
    ASSERT_TRUE(other->Send(to_us, Channel::kPlan, {&span, 1}, nullptr).ok());
    other.reset();
  });
  while (fabric->PeerStatus(to_other).ok()) fabric->Wait(absl::InfiniteDuration());
  killer.join();
  fabric->Progress();
  EXPECT_EQ(from, 5);

  absl::Status sent;
  ASSERT_TRUE(fabric
                  ->Send(to_other, Channel::kPlan, {&span, 1},
                         [&](const absl::Status& status) { sent = status; })
                  .ok());
  EXPECT_EQ(sent.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fabric->PeerStatus(to_other).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace weft
