// Faults that kernels have, planted in small ones: the emulation has to catch each of them, in some
// order of its threads. The same kernels without the fault pass in every order.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/tensor_core.h"

namespace weft::kernels::cuda {
namespace {

using cuda_emu::kOrders;
using cuda_emu::Order;

enum class Fault : std::uint8_t {
  kNone,
  kMissingBarrier,
  kDivergentBarrier,
  kBarrierAfterReturn,
  kShuffleMaskWithoutSelf,
  kHalfWarpElsewhere,
  kHalfWarpInTwoPlaces,
  kUninitialisedShared,
  kSharedOverrun,
  kGlobalOverrun,
  kMissingCopyWait,
  kBufferReusedTooEarly,
  kTwoBlocksOneAddress,
};

struct Result {
  std::string message;  // of the emulation
  bool right = false;   // values
};

struct Args {
  const float* in;
  float* out;
  int num_tiles;
  Fault fault;
};

constexpr int kThreads = 128;

// Every thread takes its value from the thread on the other end of the block.
void Reverse(Args a) {
  WEFT_SHARED(float, values, kThreads);
  const auto i = static_cast<int>(threadIdx.x);
  if (a.fault == Fault::kBarrierAfterReturn && i >= 100) return;
  if (a.fault != Fault::kUninitialisedShared || i % 2 == 0) {
    values[a.fault == Fault::kSharedOverrun ? i + 1 : i] = a.in[i];
  }
  if (a.fault == Fault::kDivergentBarrier && i < 64) {
    __syncthreads();
  } else if (a.fault != Fault::kMissingBarrier) {
    __syncthreads();
  }
  a.out[a.fault == Fault::kGlobalOverrun ? i + 1 : i] = values[kThreads - 1 - i];
}

// The sum of a warp's values.
void SumOfWarp(Args a) {
  const auto i = static_cast<int>(threadIdx.x);
  float sum = a.in[i];
  const bool apart = a.fault == Fault::kHalfWarpElsewhere && i % 32 >= 16;
  for (int lanes = 16; lanes > 0 && !apart; lanes /= 2) {
    unsigned mask = 0xFFFFFFFF;
    if (a.fault == Fault::kShuffleMaskWithoutSelf) mask = 0xFFFF;
    if (a.fault == Fault::kHalfWarpInTwoPlaces && i % 32 < 16) {
      sum += __shfl_xor_sync(mask, sum, lanes);
    } else {
      sum += __shfl_xor_sync(mask, sum, lanes);
    }
  }
  a.out[i] = sum;
}

// Sums over tiles that come by cp.async into two buffers in turn; a warp reads what others copied.
void SumOfTiles(Args a) {
  constexpr int kTile = kThreads * 4;
  WEFT_SHARED(float, tiles, 2 * kTile);
  const auto i = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int tile) {
    CpAsync16(tiles + tile % 2 * kTile + i * 4, a.in + tile * kTile + i * 4, true);
    CpAsyncCommit();
  };
  fetch(0);
  float sum = 0.0F;
  for (int tile = 0; tile < a.num_tiles; ++tile) {
    const bool more = tile + 1 < a.num_tiles;
    if (more) fetch(tile + 1);
    if (!more) {
      CpAsyncWait<0>();
    } else if (a.fault != Fault::kMissingCopyWait) {
      CpAsyncWait<1>();
    }
    __syncthreads();
    for (int j = 0; j < 4; ++j) sum += tiles[tile % 2 * kTile + (kThreads - 1 - i) * 4 + j];
    if (a.fault != Fault::kBufferReusedTooEarly) __syncthreads();
  }
  a.out[i] = sum;
}

void WriteByBlock(Args a) {
  const bool same = a.fault == Fault::kTwoBlocksOneAddress;
  a.out[same ? threadIdx.x : blockIdx.x * kThreads + threadIdx.x] = a.in[threadIdx.x];
}

using Kernel = void (*)(Args);
constexpr Kernel kKernels[] = {Reverse, SumOfWarp, SumOfTiles, WriteByBlock};

Kernel KernelOf(Fault fault) {
  switch (fault) {
    case Fault::kShuffleMaskWithoutSelf:
    case Fault::kHalfWarpElsewhere:
    case Fault::kHalfWarpInTwoPlaces:
      return SumOfWarp;
    case Fault::kMissingCopyWait:
    case Fault::kBufferReusedTooEarly:
      return SumOfTiles;
    case Fault::kTwoBlocksOneAddress:
      return WriteByBlock;
    default:
      return Reverse;
  }
}

float Want(Kernel kernel, const std::vector<float>& in, int i, int num_tiles) {
  if (kernel == Reverse) return in[kThreads - 1 - i];
  if (kernel == WriteByBlock) return in[i % kThreads];
  float sum = 0.0F;
  if (kernel == SumOfWarp) {
    for (int j = 0; j < 32; ++j) sum += in[i / 32 * 32 + j];
    return sum;
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int j = 0; j < 4; ++j) sum += in[(tile * kThreads + kThreads - 1 - i) * 4 + j];
  }
  return sum;
}

Result RunKernel(Kernel kernel, Fault fault, Order order, std::uint64_t seed) {
  cuda_emu::SetOrder(order, seed);
  constexpr int kTiles = 5;
  const unsigned num_blocks = kernel == WriteByBlock ? 2 : 1;
  std::vector<float> in(kThreads * 4 * kTiles);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 71);
  std::vector<float> out(num_blocks * kThreads, -1.0F);  // no longer, so that ASan sees an overrun
  const Args args = {.in = in.data(), .out = out.data(), .num_tiles = kTiles, .fault = fault};
  Result result;
  result.message = cuda_emu::RunGrid(num_blocks, kThreads, 0, [&] { kernel(args); });
  result.right = true;
  for (std::size_t i = 0; i < out.size(); ++i) {
    result.right &= out[i] == Want(kernel, in, static_cast<int>(i), kTiles);
  }
  return result;
}

Result RunFault(Fault fault, Order order, std::uint64_t seed = 3) {
  return RunKernel(KernelOf(fault), fault, order, seed);
}

#if !defined(__SANITIZE_THREAD__)

// How many of the orders show the fault, and what was said first.
struct Caught {
  int orders = 0;
  std::string message;
};

Caught CatchInAllOrders(Fault fault) {
  Caught caught;
  for (const Order order : kOrders) {
    const Result result = RunFault(fault, order);
    if (result.message.empty() && result.right) continue;
    ++caught.orders;
    if (caught.message.empty()) caught.message = result.message;
  }
  return caught;
}

TEST(PlantedFaultsTest, NoFaultPassesInEveryOrder) {
  for (const Order order : kOrders) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      for (const Kernel kernel : kKernels) {
        const Result result = RunKernel(kernel, Fault::kNone, order, seed);
        EXPECT_EQ(result.message, "") << OrderName(order);
        EXPECT_TRUE(result.right) << OrderName(order);
      }
    }
  }
}

TEST(PlantedFaultsTest, MissingBarrierGivesWrongValues) {
  EXPECT_GE(CatchInAllOrders(Fault::kMissingBarrier).orders, 4);
}

TEST(PlantedFaultsTest, DivergentBarrierIsToldWithBothLines) {
  const Caught caught = CatchInAllOrders(Fault::kDivergentBarrier);
  EXPECT_EQ(caught.orders, 5);
  EXPECT_NE(caught.message.find("divergent __syncthreads"), std::string::npos) << caught.message;
  // Lines of the two barriers of Reverse().
  const auto first = caught.message.find("planted_faults_test.cc:");
  ASSERT_NE(first, std::string::npos) << caught.message;
  EXPECT_NE(caught.message.find("planted_faults_test.cc:", first + 1), std::string::npos)
      << caught.message;
}

TEST(PlantedFaultsTest, BarrierAfterReturnIsTold) {
  const Caught caught = CatchInAllOrders(Fault::kBarrierAfterReturn);
  EXPECT_EQ(caught.orders, 5);
  EXPECT_NE(caught.message.find("return"), std::string::npos) << caught.message;
}

TEST(PlantedFaultsTest, BadShuffleMaskIsTold) {
  const Caught caught = CatchInAllOrders(Fault::kShuffleMaskWithoutSelf);
  EXPECT_EQ(caught.orders, 5);
  EXPECT_NE(caught.message.find("mask 0x0000ffff"), std::string::npos) << caught.message;
}

TEST(PlantedFaultsTest, HalfAWarpElsewhereIsADeadlockThatNamesWhoWaits) {
  const Caught caught = CatchInAllOrders(Fault::kHalfWarpElsewhere);
  EXPECT_EQ(caught.orders, 5);
  EXPECT_NE(caught.message.find("deadlock: 64 threads wait at __shfl_xor_sync"), std::string::npos)
      << caught.message;
}

TEST(PlantedFaultsTest, OneShuffleFromTwoPlacesIsTold) {
  const Caught caught = CatchInAllOrders(Fault::kHalfWarpInTwoPlaces);
  EXPECT_EQ(caught.orders, 5);
  EXPECT_NE(caught.message.find("met apart"), std::string::npos) << caught.message;
}

TEST(PlantedFaultsTest, UninitialisedSharedMemoryGivesWrongValues) {
  EXPECT_EQ(CatchInAllOrders(Fault::kUninitialisedShared).orders, 5);
}

TEST(PlantedFaultsTest, MissingCopyWaitGivesWrongValues) {
  EXPECT_EQ(CatchInAllOrders(Fault::kMissingCopyWait).orders, 5);
}

TEST(PlantedFaultsTest, BufferReusedWithoutABarrierShowsWhereAWarpRunsAhead) {
  EXPECT_GE(CatchInAllOrders(Fault::kBufferReusedTooEarly).orders, 1);
}

#endif  // no TSan

#if defined(__SANITIZE_ADDRESS__)

TEST(PlantedFaultsDeathTest, SharedOverrunIsSeen) {
  EXPECT_DEATH(RunFault(Fault::kSharedOverrun, Order::kFifo), "heap-buffer-overflow");
}

TEST(PlantedFaultsDeathTest, GlobalOverrunIsSeen) {
  EXPECT_DEATH(RunFault(Fault::kGlobalOverrun, Order::kFifo), "heap-buffer-overflow");
}

#endif

#if defined(__SANITIZE_THREAD__)

TEST(PlantedFaultsDeathTest, NoFaultIsNoRace) {
  for (const Order order : kOrders) {
    for (const Kernel kernel : kKernels) {
      EXPECT_TRUE(RunKernel(kernel, Fault::kNone, order, 1).right);
    }
  }
}

class RaceTest : public ::testing::TestWithParam<Fault> {};

// The detector ends the process with its exit code after the report.
TEST_P(RaceTest, IsSeenInEveryOrder) {
  for (const Order order : kOrders) {
    EXPECT_EXIT(
        {
          RunFault(GetParam(), order);
          std::exit(0);
        },
        ::testing::ExitedWithCode(66), "data race");
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, RaceTest,
                         ::testing::Values(Fault::kMissingBarrier, Fault::kBufferReusedTooEarly,
                                           Fault::kTwoBlocksOneAddress));

#endif

}  // namespace
}  // namespace weft::kernels::cuda
