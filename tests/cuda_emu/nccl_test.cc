// Collectives between devices, over the emulated NCCL: what they give, in graphs, too, and what
// comes of ranks that disagree, stall, or are gone.

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "kernels/device/mirror.h"

namespace weft::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr std::int64_t kCount = 5;  // floats that a rank has for each
constexpr absl::Duration kTimeout = absl::Seconds(20);

// One rank: a device, a communicator, and what goes in and comes out.
struct Member {
  CpuStream host{1};
  std::unique_ptr<DeviceStream> device;
  std::unique_ptr<DeviceCommunicator> group;
  Mirror<float> in;   // [kRanks, kCount]
  Mirror<float> out;  // [kRanks, kCount]

  absl::Status Join(const DeviceGroup& joining) {
    ASSIGN_OR_RETURN(device, cuda::CudaDevice::Open(joining.rank, host));
    ASSIGN_OR_RETURN(group, device->JoinGroup(joining));
    ASSIGN_OR_RETURN(in, Mirror<float>::Create(kRanks * kCount, *device));
    ASSIGN_OR_RETURN(out, Mirror<float>::Create(kRanks * kCount, *device));
    return absl::OkStatus();
  }
  absl::Status SendIn(float first) {
    std::iota(in.host(), in.host() + kRanks * kCount,
              first + 100.0F * static_cast<float>(group->rank()));
    return in.Send(kRanks * kCount, *device);
  }
  absl::Status FetchOut() {
    RETURN_IF_ERROR(out.Fetch(kRanks * kCount, *device));
    return device->Synchronize();
  }
};

DeviceGroup NewGroup(int size, absl::Duration stall_timeout = kTimeout) {
  CpuStream host(1);
  const auto device = cuda::CudaDevice::Open(0, host);
  EXPECT_TRUE(device.ok()) << device.status();
  const auto id = (*device)->NewGroupId();
  EXPECT_TRUE(id.ok()) << id.status();
  return {.id = *id, .size = size, .join_timeout = kTimeout, .stall_timeout = stall_timeout};
}

using Body = std::function<absl::Status(Member&)>;

// Runs `body` on every rank at once, each on a thread; what each returned.
std::vector<absl::Status> OnEveryRank(int size, absl::Duration stall_timeout, const Body& body) {
  const DeviceGroup group = NewGroup(size, stall_timeout);
  std::vector<absl::Status> statuses(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r, own = group]() mutable {
      own.rank = r;
      Member member;
      absl::Status status = member.Join(own);
      if (status.ok()) status = body(member);
      statuses[static_cast<std::size_t>(r)] = status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// What `rank` has in its part for rank `to`.
float InOf(int rank, int to, std::int64_t i, float first) {
  return first + 100.0F * static_cast<float>(rank) + static_cast<float>(to * kCount + i);
}
float SumOf(int to, std::int64_t i, float first) {
  float sum = 0;
  for (int r = 0; r < kRanks; ++r) sum += InOf(r, to, i, first);
  return sum;
}

absl::Status Unequal(const char* what, int rank, std::int64_t at, float got, float want) {
  return absl::DataLossError(
      fmt::format("{}: rank {} has {} at {}, not {}", what, rank, got, at, want));
}

// Every collective with new values, all checked.
absl::Status RunAll(Member& m, float first) {
  const int rank = m.group->rank();
  const auto check = [&](const char* what, std::int64_t count, const auto& want) -> absl::Status {
    RETURN_IF_ERROR(m.FetchOut());
    for (std::int64_t i = 0; i < count; ++i) {
      if (m.out.host()[i] != want(i)) return Unequal(what, rank, i, m.out.host()[i], want(i));
    }
    return absl::OkStatus();
  };
  constexpr std::int64_t kBytes = kCount * std::int64_t{sizeof(float)};
  RETURN_IF_ERROR(m.SendIn(first));
  RETURN_IF_ERROR(m.group->AllGather(m.in.data(), m.out.data(), kBytes));
  RETURN_IF_ERROR(check("AllGather", kRanks * kCount, [&](std::int64_t i) {
    return InOf(static_cast<int>(i / kCount), 0, i % kCount, first);
  }));
  RETURN_IF_ERROR(m.group->AllToAll(m.in.data(), m.out.data(), kBytes));
  RETURN_IF_ERROR(check("AllToAll", kRanks * kCount, [&](std::int64_t i) {
    return InOf(static_cast<int>(i / kCount), rank, i % kCount, first);
  }));
  RETURN_IF_ERROR(m.group->ReduceScatterSum(m.in.data(), m.out.data(), kCount));
  RETURN_IF_ERROR(
      check("ReduceScatterSum", kCount, [&](std::int64_t i) { return SumOf(rank, i, first); }));
  RETURN_IF_ERROR(m.group->AllGather(m.in.data(), m.out.data(), 0));
  RETURN_IF_ERROR(m.group->AllReduceSum(m.in.data(), kRanks * kCount));
  RETURN_IF_ERROR(m.group->AllGather(m.in.data(), m.out.data(), kBytes));
  return check("AllReduceSum", kRanks * kCount,
               [&](std::int64_t i) { return SumOf(0, i % kCount, first); });
}

TEST(NcclTest, CollectivesGiveWhatTheirContractsSay) {
  const auto statuses = OnEveryRank(kRanks, kTimeout, [](Member& m) {
    absl::Status status;
    for (const float first : {1.0F, 7.0F, 1000.0F}) status.Update(RunAll(m, first));
    return status;
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(NcclTest, AnAllToAllIsSendsAndReceivesBeforeNccl228) {
  const DeviceGroup group = NewGroup(kRanks);
  std::vector<absl::Status> statuses(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r, own = group]() mutable {
      own.rank = r;
      Member member;
      cuda::NcclApi api = **cuda::Nccl();
      api.all_to_all = nullptr;
      std::vector<cuda::NcclCommunicator*> all;
      const auto stream = cuda::CudaStream::Create();
      statuses[r] = [&]() -> absl::Status {
        ASSIGN_OR_RETURN(member.device, cuda::CudaDevice::Open(r, member.host));
        ASSIGN_OR_RETURN(member.in, Mirror<float>::Create(kRanks * kCount, *member.device));
        ASSIGN_OR_RETURN(member.out, Mirror<float>::Create(kRanks * kCount, *member.device));
        ASSIGN_OR_RETURN(member.group,
                         cuda::NcclCommunicator::Join(api, own, (*stream)->handle(), all));
        RETURN_IF_ERROR(member.SendIn(3.0F));
        RETURN_IF_ERROR(member.device->Synchronize());
        RETURN_IF_ERROR(member.group->AllToAll(member.in.data(), member.out.data(),
                                               kCount * std::int64_t{sizeof(float)}));
        RETURN_IF_ERROR((*stream)->Synchronize());
        RETURN_IF_ERROR(member.FetchOut());
        for (std::int64_t i = 0; i < kRanks * kCount; ++i) {
          const float want = InOf(static_cast<int>(i / kCount), r, i % kCount, 3.0F);
          if (member.out.host()[i] != want)
            return Unequal("AllToAll", r, i, member.out.host()[i], want);
        }
        return absl::OkStatus();
      }();
      member.group = nullptr;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(NcclTest, AReplayExchangesWhatIsThereThen) {
  const auto statuses = OnEveryRank(kRanks, kTimeout, [](Member& m) -> absl::Status {
    RETURN_IF_ERROR(m.device->BeginCapture());
    RETURN_IF_ERROR(m.group->ReduceScatterSum(m.in.data(), m.out.data(), kCount));
    ASSIGN_OR_RETURN(const std::unique_ptr<DeviceGraph> graph, m.device->EndCapture());
    for (const float first : {2.0F, 50.0F}) {
      RETURN_IF_ERROR(m.SendIn(first));
      RETURN_IF_ERROR(m.device->Launch(*graph));
      RETURN_IF_ERROR(m.FetchOut());
      for (std::int64_t i = 0; i < kCount; ++i) {
        const float want = SumOf(m.group->rank(), i, first);
        if (m.out.host()[i] != want) {
          return Unequal("replay", m.group->rank(), i, m.out.host()[i], want);
        }
      }
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(NcclTest, RanksMayBeProcesses) {
  DeviceGroup group = NewGroup(kRanks);
  const auto run = [&group](int rank) {
    group.rank = rank;
    Member member;
    absl::Status status = member.Join(group);
    if (status.ok()) status = RunAll(member, 4.0F);
    return status;
  };
  std::vector<pid_t> children;
  for (int r = 1; r < kRanks; ++r) {
    const pid_t child = fork();
    if (child == 0) _exit(run(r).ok() ? 0 : 1);
    children.push_back(child);
  }
  const absl::Status own = run(0);
  EXPECT_TRUE(own.ok()) << own;
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// Of two ranks, each with a call of its own.
void ExpectBothFail(const Body& first, const Body& second, absl::StatusCode code,
                    const std::string& text) {
  const auto statuses = OnEveryRank(2, kTimeout, [&](Member& m) {
    absl::Status status = m.group->rank() == 0 ? first(m) : second(m);
    status.Update(m.device->Synchronize());
    // It stays so.
    EXPECT_FALSE(m.group->AllGather(m.in.data(), m.out.data(), 4).ok());
    return status;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

TEST(NcclTest, RanksThatDisagreeAreToldWhatBothCalled) {
  const auto sum = [](std::int64_t count) {
    return [count](Member& m) { return m.group->AllReduceSum(m.in.data(), count); };
  };
  const auto gather = [](Member& m) { return m.group->AllGather(m.in.data(), m.out.data(), 8); };
  ExpectBothFail(sum(4), sum(5), absl::StatusCode::kInternal, "ncclAllReduce of 5 floats");
  ExpectBothFail(gather, sum(2), absl::StatusCode::kInternal, "ncclAllGather of 8 bytes");
}

TEST(NcclTest, APeerThatHasGoneIsUnavailable) {
  const auto statuses = OnEveryRank(2, kTimeout, [](Member& m) {
    if (m.group->rank() == 1) return absl::OkStatus();  // ends, and its communicator with it
    absl::Status status = m.group->AllReduceSum(m.in.data(), 4);
    status.Update(m.device->Synchronize());
    return status;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kUnavailable) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("rank 1 has aborted"));
}

TEST(NcclTest, APeerThatStallsIsNotWaitedForLongerThanSaid) {
  std::atomic<bool> ended{false};
  const auto statuses = OnEveryRank(2, absl::Milliseconds(50), [&](Member& m) {
    if (m.group->rank() == 1) {
      while (!ended) absl::SleepFor(absl::Milliseconds(1));
      return absl::OkStatus();
    }
    absl::Status status = m.group->AllReduceSum(m.in.data(), 4);
    status.Update(m.device->Synchronize());
    ended = true;
    return status;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kUnavailable) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("50ms"));
}

TEST(NcclTest, AbortEndsAWaitFromAnyThread) {
  std::atomic<bool> ended{false};
  const auto statuses = OnEveryRank(2, kTimeout, [&](Member& m) {
    if (m.group->rank() == 1) {
      while (!ended) absl::SleepFor(absl::Milliseconds(1));
      return absl::OkStatus();
    }
    absl::Status status = m.group->AllReduceSum(m.in.data(), 4);
    std::thread aborts([&] { m.group->Abort(); });
    status.Update(m.device->Synchronize());
    aborts.join();
    ended = true;
    return status;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kAborted) << statuses[0];
}

TEST(NcclTest, ARankThatDoesNotJoinIsNotWaitedForLongerThanSaid) {
  DeviceGroup group = NewGroup(2);
  group.join_timeout = absl::Milliseconds(20);
  Member member;
  const absl::Status status = member.Join(group);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 of 2 waited 20ms"));
}

TEST(NcclTest, AFailingLinkIsUnavailable) {
  cuda_emu::SetFault("collective 1 after 2");
  const auto statuses = OnEveryRank(kRanks, kTimeout, [](Member& m) {
    absl::Status status;
    for (int i = 0; i < 3 && status.ok(); ++i) status = RunAll(m, 1.0F);
    return status;
  });
  cuda_emu::SetFault("");
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr("the link is down"));
}

// Two ranks with symmetric memory, of `bytes` the first.
std::vector<absl::Status> WithSymmetricMemory(
    const std::function<std::int64_t(int rank)>& bytes,
    const std::function<absl::Status(Member& m, float* memory)>& body) {
  DeviceGroup group = NewGroup(2);
  group.symmetric_memory = true;
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r, own = group]() mutable {
      own.rank = r;
      Member member;
      statuses[r] = [&]() -> absl::Status {
        RETURN_IF_ERROR(member.Join(own));
        ASSIGN_OR_RETURN(void* first, member.group->Allocate(bytes(r)));
        ASSIGN_OR_RETURN(void* second, member.group->Allocate(64));
        const absl::Status status = body(member, static_cast<float*>(first));
        member.group->Free(second);
        member.group->Free(first);
        return status;
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

TEST(NcclTest, SymmetricMemoryIsExchanged) {
  const auto statuses = WithSymmetricMemory(
      [](int) { return 256; },
      [](Member& m, float* memory) {
        const float own = m.group->rank() == 0 ? 1.0F : 10.0F;
        m.in.host()[0] = m.in.host()[1] = own;
        RETURN_IF_ERROR(m.device->CopyToDevice(memory, m.in.host(), 8));
        RETURN_IF_ERROR(m.group->AllReduceSum(memory, 2));
        RETURN_IF_ERROR(m.group->AllGather(memory, memory + 8, 8));  // within the window
        RETURN_IF_ERROR(m.device->CopyToHost(m.out.host(), memory + 8, 16));
        RETURN_IF_ERROR(m.device->Synchronize());
        return m.out.host()[3] == 11.0F
                   ? absl::OkStatus()
                   : Unequal("sum", m.group->rank(), 3, m.out.host()[3], 11.0F);
      });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(NcclTest, WithSymmetricMemoryNoOtherIsUsed) {
  for (const bool beyond : {false, true}) {
    const auto statuses =
        WithSymmetricMemory([](int) { return 256; },
                            [beyond](Member& m, float* memory) {
                              return m.group->AllReduceSum(beyond ? memory + 62 : m.in.data(), 4);
                            });
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("no device memory of a window"));
    }
  }
}

TEST(NcclTest, WindowsOfSeveralSizesAreAnError) {
  const auto statuses = WithSymmetricMemory([](int rank) { return 256 + rank; },
                                            [](Member&, float*) { return absl::OkStatus(); });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a window of 25"));
  }
}

TEST(NcclTest, AnAbsentLibraryIsOneLine) {
  const absl::Status status = cuda::OpenNccl("libnccl-that-is-not-there.so").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("libnccl-that-is-not-there.so"));
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos) << status;
}

TEST(NcclTest, ALibraryWithoutItsFunctionsIsToldApart) {
  const absl::Status status = cuda::OpenNccl("libm.so.6").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ncclCommInitRankConfig"));
}

}  // namespace
}  // namespace weft::kernels
