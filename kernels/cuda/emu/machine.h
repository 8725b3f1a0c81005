#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

// A GPU's threads on one CPU thread, so that the kernels' own sources run and are checked where
// there is no GPU. Threads of a block are fibers that run until they wait for each other: at a
// barrier, a shuffle or another operation of the warp. What waits is known by operation and line,
// so threads that wait for different things, or for threads that have returned, are named.
//
// Threading: every OS thread has a machine of its own.

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3() = default;
  constexpr dim3(unsigned in_x, unsigned in_y = 1, unsigned in_z = 1) : x(in_x), y(in_y), z(in_z) {}
};

namespace weft::cuda_emu {

using Where = std::source_location;

// Which of the threads that could run goes next. A fault often shows in some orders only.
enum class Order : std::uint8_t { kFifo, kReversed, kRandom, kLowestWarpAhead, kHighestWarpAhead };
inline constexpr Order kOrders[] = {Order::kFifo, Order::kReversed, Order::kRandom,
                                    Order::kLowestWarpAhead, Order::kHighestWarpAhead};
const char* OrderName(Order order);

// Of the grids that this OS thread runs from now on. `seed` counts for kRandom.
void SetOrder(Order order, std::uint64_t seed = 0);

// Runs thread_main once for every thread of the grid. Returns what went wrong, or "": a fault ends
// the grid at once. Shared memory starts as NaN.
std::string RunGrid(dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                    const std::function<void()>& thread_main);

// What follows is for the threads of a grid.

struct ThreadView {
  uint3 thread_idx;
  uint3 block_idx;
  dim3 block_dim;
  dim3 grid_dim;
  int lane;
};
extern thread_local constinit const ThreadView* current_thread;

// Ends the grid with this message.
[[noreturn]] void Fail(std::string message);

// The block's array of `bytes` that is declared at `where`; the same for all its threads.
void* StaticShared(std::size_t bytes, Where where);
void* DynamicShared();

void BlockBarrier(Where where);

// A meeting of the lanes of `mask`: each brings up to kLaneBytes, the last one runs `finish` over
// all of them (it may be null), and each takes what is then there, of its own lane or another's.
inline constexpr int kWarpSize = 32;
inline constexpr std::size_t kLaneBytes = 64;
struct LaneData {
  alignas(16) std::byte bytes[kLaneBytes];
};
using Finish = void (*)(std::uint32_t mask, LaneData* lanes);
enum class Memory : std::uint8_t { kUnordered, kOrdered };
// Returns a handle for TakeLane(), valid until this lane's next meeting.
const LaneData* WarpMeet(std::uint32_t mask, const char* operation, Where where, Memory memory,
                         const void* data, std::size_t bytes, Finish finish = nullptr);
void TakeLane(const LaneData* lanes, int lane, void* out, std::size_t bytes);
// What TakeLane() of `lane` gives; for a Finish.
void PutLane(LaneData* lanes, int lane, const void* data, std::size_t bytes);
// One bit a lane of `mask`: its vote.
std::uint32_t Ballot(std::uint32_t mask, bool vote, const char* operation, Where where);
// Fails unless `lane` is in `mask`.
void CheckLane(std::uint32_t mask, int lane, const char* operation, Where where);

// cp.async: the target is NaN from here on; the bytes come when the thread waits for them.
void CopyAsync(void* to, const void* from, std::uint32_t bytes, std::uint32_t valid_bytes);
void CopyAsyncCommit();
void CopyAsyncWait(int groups_in_flight);

// Tells the race detector of an access by this runtime, which it does not see by itself.
void NoteRead(const void* data, std::size_t bytes);
void NoteWrite(void* data, std::size_t bytes);

// What the threads of this OS thread's grids did since ResetCounters(). Launches are also those of
// products by cuBLASLt. Global bytes are those of
// accesses through the vector types (kernels/cuda/types.h); conflicts are extra passes of ldmatrix
// over the 32 banks.
struct Counters {
  std::int64_t launches = 0;
  std::int64_t global_read_bytes = 0;
  std::int64_t global_written_bytes = 0;
  std::int64_t matrix_loads = 0;
  std::int64_t bank_conflicts = 0;
};
const Counters& CountersOfThread();
void ResetCounters();
void CountLaunch();
void CountGlobal(std::int64_t read_bytes, std::int64_t written_bytes);
void CountMatrixLoad(std::int64_t bank_conflicts);

}  // namespace weft::cuda_emu
