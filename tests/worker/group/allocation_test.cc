// Law 7: no allocation of ours in the communicator after warm-up. Counts operator new; UCX, which
// is exempt, uses malloc.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/rank_processes.h"

namespace {
thread_local std::uint64_t num_allocations = 0;
}  // namespace

// noinline: or gcc sees new and free side by side and calls them a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++num_allocations;
  void* const p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) std::abort();
  return p;
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace weft {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

absl::Status CallAll(Communicator& c, std::int64_t count, float* in, float* out) {
  static NoStream stream;
  const std::int64_t bytes = count * 4;
  if (auto s = c.AllReduceSum(in, count, DType::kFloat32, stream); !s.ok()) return s;
  if (auto s = c.AllGather(in, out, bytes, stream); !s.ok()) return s;
  if (auto s = c.AllToAll(in, out, bytes, stream); !s.ok()) return s;
  if (auto s = c.Gather(in, out, bytes, stream); !s.ok()) return s;
  if (auto s = c.Gather(in, out, bytes, stream); !s.ok()) return s;
  return c.ReduceScatterSum(in, out, count, DType::kFloat32, stream);
}

std::string CheckNoAllocation(RankContext& context) {
  constexpr std::int64_t kMaxCount = 30000;
  const auto communicator = context.MakeCommunicator(
      {.id = 1, .max_bytes = kMaxCount * 4 * static_cast<std::int64_t>(context.peers.size())});
  NoStream stream;
  // Long calls read it where it lies, short ones are sent.
  const kernels::Buffer in = *communicator->Allocate(
      kMaxCount * 4 * static_cast<std::int64_t>(context.peers.size()), stream);
  std::vector<float> out(kMaxCount * context.peers.size());
  // Larger than what is measured, so that the fabric's pools have their size.
  for (int i = 0; i < 30; ++i) {
    if (auto s = CallAll(*communicator, kMaxCount, in.as<float>(), out.data()); !s.ok()) {
      return s.ToString();
    }
  }
  // A pool may still grow when a peer lost its core for long; what a call itself allocates would
  // show in every round.
  std::uint64_t fewest = std::numeric_limits<std::uint64_t>::max();
  for (int round = 0; round < 5; ++round) {
    const std::uint64_t before = num_allocations;
    for (int i = 0; i < 100; ++i) {
      if (auto s = CallAll(*communicator, i * 737 % 20000, in.as<float>(), out.data()); !s.ok()) {
        return s.ToString();
      }
    }
    fewest = std::min(fewest, num_allocations - before);
  }
  if (fewest > 0) return std::to_string(fewest) + " allocations in every round";
  return "";
}

TEST(AllocationTest, CollectivesOnThreadsAllocateNothing) {
  for (int n = 1; n <= 4; ++n) {
    EXPECT_THAT(RunOnThreads(n, CheckNoAllocation), Each(IsEmpty()));
  }
}

TEST(AllocationTest, CollectivesOverUcxAllocateNothing) {
  for (int n : {2, 3}) {
    RankProcesses ranks(n, CheckNoAllocation);
    EXPECT_THAT(ranks.JoinAll(), Each(IsEmpty()));
  }
}

}  // namespace
}  // namespace weft
