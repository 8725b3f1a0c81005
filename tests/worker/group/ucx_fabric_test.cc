// UCX between processes. The parent never uses UCX itself: see RankProcesses.

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/fabric_checks.h"
#include "tests/worker/group/rank_processes.h"
#include "worker/group/communicator.h"
#include "worker/group/ucx_address.h"

namespace weft {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Ranks that inherit a UCX variable.
class UcxOverTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (*GetParam() != '\0') setenv("UCX_TLS", GetParam(), 1);
  }
  void TearDown() override { unsetenv("UCX_TLS"); }
};

INSTANTIATE_TEST_SUITE_P(, UcxOverTest, testing::Values("", "tcp"), [](const auto& info) {
  return *info.param == '\0' ? "SharedMemory" : "Tcp";
});

TEST_P(UcxOverTest, EveryCollectiveEqualsBruteForce) {
  for (int n = 2; n <= 4; ++n) {
    RankProcesses ranks(n, [](RankContext& c) { return CheckCollectives(c, 3); });
    EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
  }
}

TEST_P(UcxOverTest, MessagesOfASenderArriveInOrderOverAllChannels) {
  RankProcesses ranks(3,
                      [&](RankContext& c) { return CheckOrder(c, 1, 60, std::int64_t{24} << 20); });
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

TEST_P(UcxOverTest, WakeEndsAWait) {
  RankProcesses ranks(1, CheckWake);
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

TEST_P(UcxOverTest, RefusesWhatItMust) {
  RankProcesses ranks(1, [](RankContext& c) {
    std::string damaged = c.fabric->LocalAddress();
    damaged[damaged.size() / 2] ^= 1;
    if (c.fabric->Connect(damaged, 0).status().code() != absl::StatusCode::kInvalidArgument) {
      return std::string("connected to a damaged address");
    }
    return CheckRefusals(c);
  });
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

// UCX takes a connection from anybody who reaches its port.
TEST_P(UcxOverTest, HearsOnlyThoseWhoWereGivenItsAddress) {
  RankProcesses ranks(1, [](RankContext& c) -> std::string {
    const std::string own = c.fabric->LocalAddress();
    FabricAddress guessed = *DecodeFabricAddress(own);
    guessed.key ^= 1;
    std::vector<std::uint32_t> heard;
    c.fabric->Receive(Channel::kKv, [&heard](std::uint32_t tag, absl::Span<const std::byte>) {
      heard.push_back(tag);
    });
    const std::byte byte{7};
    const absl::Span<const std::byte> message(&byte, 1);
    for (const std::uint32_t tag : {1U, 2U}) {
      const auto peer = c.fabric->Connect(tag == 1 ? EncodeFabricAddress(guessed) : own, tag);
      if (!peer.ok()) return peer.status().ToString();
      bool sent = false;
      const absl::Status status = c.fabric->Send(*peer, Channel::kKv, {message},
                                                 [&sent](const absl::Status&) { sent = true; });
      if (!status.ok()) return status.ToString();
      while (!sent) c.fabric->Wait(absl::Milliseconds(10));
    }
    while (heard.empty()) c.fabric->Wait(absl::Milliseconds(10));
    return heard == std::vector<std::uint32_t>{2} ? "" : "heard a stranger";
  });
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

struct Reduced {
  std::int64_t count;
  bool shared;  // the communicator's memory
};
constexpr Reduced kReduced[] = {{1000, false}, {2'000'000, false}, {2'000'000, true}};

// All-reduces until one fails; answers with the error.
std::string ReduceUntilError(RankContext& context, absl::Duration stall_timeout,
                             const Reduced& reduced) {
  const std::int64_t count = reduced.count;
  NoStream stream;
  const std::unique_ptr<Communicator> communicator =
      context.MakeCommunicator({.id = 1, .max_bytes = count * 4, .stall_timeout = stall_timeout});
  const kernels::Buffer data = *(reduced.shared ? communicator->Allocate(count * 4, stream)
                                                : kernels::Buffer::Allocate(count * 4));
  const auto reduce = [&] {
    return communicator->AllReduceSum(data.data(), count, DType::kFloat32, stream);
  };
  for (int i = 0;; ++i) {
    const absl::Status status = reduce();
    if (!status.ok()) {
      const absl::Status again = reduce();
      if (again != status) return "a failed communicator did not stay failed";
      return status.ToString();
    }
    if (i == 10 && write(context.control_fd, "r", 1) != 1) return "no control";
  }
}

TEST_P(UcxOverTest, AKilledPeerEndsACollectiveWithUnavailable) {
  // With a stall timeout that never passes here, UCX itself has to notice.
  for (const Reduced& reduced : kReduced) {
    RankProcesses ranks(
        3, [&](RankContext& c) { return ReduceUntilError(c, absl::Minutes(10), reduced); });
    for (int r = 0; r < 3; ++r) ranks.AwaitByte(r);
    ranks.Kill(1);
    EXPECT_THAT(ranks.Join(0), HasSubstr("UNAVAILABLE"));
    EXPECT_THAT(ranks.Join(2), HasSubstr("UNAVAILABLE"));
  }
}

TEST_P(UcxOverTest, AStoppedPeerEndsACollectiveWithUnavailableAfterTheStallTimeout) {
  for (const Reduced& reduced : kReduced) {
    RankProcesses ranks(
        3, [&](RankContext& c) { return ReduceUntilError(c, absl::Seconds(1), reduced); });
    for (int r = 0; r < 3; ++r) ranks.AwaitByte(r);
    kill(ranks.pid(1), SIGSTOP);
    // Whoever gives up second may find the other gone.
    const std::vector<std::string> answers = {ranks.Join(0), ranks.Join(2)};
    EXPECT_THAT(answers, Each(HasSubstr("UNAVAILABLE")));
    EXPECT_THAT(answers, Contains(HasSubstr("UNAVAILABLE: nothing arrived for 1s")));
  }
}

TEST_P(UcxOverTest, APeerThatWasDeadBeforeWeConnectedIsUnavailable) {
  RankProcesses ranks(2, [](RankContext& c) -> std::string {
    char byte = 0;
    if (read(c.control_fd, &byte, 1) != 1) return "no control";
    NoStream stream;
    return c.MakeCommunicator({.id = 1, .max_bytes = 64, .stall_timeout = absl::Minutes(10)})
        ->AllGather(nullptr, nullptr, 0, stream)
        .ToString();
  });
  ranks.Kill(1);
  ranks.SendByte(0);
  EXPECT_THAT(ranks.Join(0), HasSubstr("UNAVAILABLE"));
}

TEST_P(UcxOverTest, AbortFromAnotherThreadEndsACollective) {
  RankProcesses ranks(2, [](RankContext& c) -> std::string {
    NoStream stream;
    const std::unique_ptr<Communicator> communicator =
        c.MakeCommunicator({.id = 1, .max_bytes = 64, .stall_timeout = absl::Minutes(10)});
    char byte = 0;
    if (c.rank == 1) return read(c.control_fd, &byte, 1) == 1 ? "" : "no control";
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      communicator->Abort();
    });
    const absl::Status status = communicator->AllGather(nullptr, nullptr, 0, stream);
    aborter.join();
    return status.ToString();
  });
  EXPECT_THAT(ranks.Join(0), HasSubstr("ABORTED"));
  ranks.SendByte(1);
  EXPECT_THAT(ranks.Join(1), IsEmpty());
}

TEST_P(UcxOverTest, ThreadsOfOneProcessHaveAFabricEach) {
  RankProcesses ranks(1, [](RankContext&) -> std::string {
    const auto make = [](int) { return *MakeUcxFabric(); };
    std::string all;
    for (const std::string& answer : RunOnThreads(
             3, [](RankContext& c) { return CheckCollectives(c, 5); }, make)) {
      all += answer;
    }
    return all;
  });
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

TEST(UcxFabricTest, DeadPeersThatAreDisconnectedLeaveNothingBehind) {
  RankProcesses ranks(1, [](RankContext&) {
    return CheckDisconnect([] { return *MakeUcxFabric(UcxReach::kBetweenGroups); });
  });
  EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
}

std::set<std::string> SharedMemoryFiles() {
  std::set<std::string> names;
  DIR* const dir = opendir("/dev/shm");
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) {
    if (std::string_view(entry->d_name).starts_with("ucx")) names.insert(entry->d_name);
  }
  closedir(dir);
  return names;
}

// What of the shared memory that these processes made is still there, of either kind.
std::vector<std::string> SharedMemoryOf(const std::set<pid_t>& pids,
                                        const std::set<std::string>& files_before) {
  std::vector<std::string> left;
  for (const std::string& file : SharedMemoryFiles()) {
    if (!files_before.contains(file)) left.push_back(file);
  }
  std::ifstream segments("/proc/sysvipc/shm");
  std::string line;
  std::getline(segments, line);  // titles
  while (std::getline(segments, line)) {
    std::istringstream fields(line);
    std::string key, id, permissions, size;
    pid_t creator = 0;
    fields >> key >> id >> permissions >> size >> creator;
    if (pids.contains(creator)) left.push_back("segment " + id);
  }
  return left;
}

TEST(UcxFabricTest, LeavesNoSharedMemoryWhenKilled) {
  const std::set<std::string> files_before = SharedMemoryFiles();
  std::set<pid_t> pids;
  for (int delay_ms : {0, 1, 5, 20, 100}) {
    for (const Reduced& reduced : kReduced) {
      RankProcesses ranks(
          3, [&](RankContext& c) { return ReduceUntilError(c, absl::Seconds(30), reduced); });
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      for (int r = 0; r < 3; ++r) {
        pids.insert(ranks.pid(r));
        ranks.Kill(r);
      }
    }
  }
  EXPECT_THAT(SharedMemoryOf(pids, files_before), IsEmpty());
}

}  // namespace
}  // namespace weft
