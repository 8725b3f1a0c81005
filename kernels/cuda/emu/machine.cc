#include "kernels/cuda/emu/machine.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// This file is not instrumented for races (its switches would look like some), so the compiler
// does not say whether the rest is.
#if defined(WEFT_EMU_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
}
#endif

namespace weft::cuda_emu {

thread_local constinit const ThreadView* current_thread = nullptr;

namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr std::size_t kMaxSharedBytes = 227 * 1024;
// Of address space; pages come on first use. For the race detector every thread of a grid has a
// stack of its own, since blocks count as running at once.
#if defined(WEFT_EMU_TSAN)
constexpr int kNumStacks = 7936;  // TSan has 8,192
constexpr std::size_t kStackBytes = 64 * 1024;
#else
constexpr int kNumStacks = kMaxThreads;
constexpr std::size_t kStackBytes = 256 * 1024;
#endif
[[maybe_unused]] constexpr int kMaxStaticArrays = 64;
[[maybe_unused]] constexpr std::size_t kTsanArenaBytes = 64 * 1024;
constexpr int kMaxCopies = 256;
constexpr int kMaxCopyGroups = 16;
constexpr int kMaxMeets = 8;  // masks in use by one warp

#if defined(WEFT_EMU_TSAN)
void Acquire(void* address) { __tsan_acquire(address); }
void Release(void* address) { __tsan_release(address); }
#else
void Acquire(void*) {}
void Release(void*) {}
#endif

// Valid until the fourth call from here on; no string, since Fail() leaves its caller's behind.
const char* Line(const Where& where) {
  thread_local char texts[4][96];
  thread_local int next = 0;
  std::string_view file = where.file_name();
  if (const auto slash = file.rfind('/'); slash != file.npos) file.remove_prefix(slash + 1);
  char* text = texts[next++ % 4];
  const auto end = fmt::format_to_n(text, sizeof(texts[0]) - 1, "{}:{}", file, where.line());
  *end.out = '\0';
  return text;
}

bool SamePlace(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::string_view(a.file_name()) == b.file_name();
}

struct AsyncCopy {
  void* to;
  const void* from;
  std::uint32_t bytes;
  std::uint32_t valid_bytes;
};

struct Fiber {
  fcontext_t context;
  ThreadView view;
  int index;  // in the block
  bool done;
  const char* waits_for;  // null while it runs or could
  Where where;
  std::uint32_t mask;
  int num_copies;
  int num_groups;
  std::array<AsyncCopy, kMaxCopies> copies;
  std::array<int, kMaxCopyGroups> group_end;  // ends of committed groups in `copies`
  void* asan_stack;
};

// Two buffers: lanes may still take from one meeting's while others come to the next.
struct Meet {
  std::uint32_t mask;
  std::uint32_t arrived;
  const char* operation;
  Where where;
  int buffer;
  LaneData lanes[2][kWarpSize];
};

struct Warp {
  int num_meets;
  Meet meets[kMaxMeets];
};

struct Free {
  void operator()(std::byte* data) const { std::free(data); }
};
using SharedBytes = std::unique_ptr<std::byte[], Free>;

// An allocation of just these bytes each, so that ASan sees who goes past them.
SharedBytes NaNs(std::size_t bytes) {
  void* data = nullptr;
  CHECK(posix_memalign(&data, 128, bytes) == 0);
  std::memset(data, 0xFF, bytes);
  return SharedBytes(static_cast<std::byte*>(data));
}

struct SharedArray {
  Where where;
  std::size_t bytes;
  SharedBytes data;
};

struct Machine {
  Machine() : fibers(kMaxThreads), warps(kMaxWarps) {
    stacks = static_cast<std::byte*>(mmap(nullptr, kNumStacks * kStackBytes, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    CHECK(stacks != MAP_FAILED);
  }
  ~Machine() { munmap(stacks, kNumStacks * kStackBytes); }

  Order order = Order::kFifo;
  std::uint64_t random = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::byte* stacks;
  std::array<std::uint64_t, kMaxThreads / 64> ready{};
  const std::function<void()>* thread_main = nullptr;
  int num_threads = 0;
  int num_live = 0;
  Fiber* current = nullptr;
  fcontext_t main_context = nullptr;
  bool failed = false;
  std::string message;
  int barrier_arrived = 0;
  std::uint64_t barriers_passed = 0;
  char barrier_order[2];  // for the race detector
  Where barrier_where;
  std::vector<SharedArray> shared;  // of the block
  // Of blocks that have ended, kept for the race detector until the grid has.
  std::vector<SharedArray> old_shared;
  SharedBytes dynamic_shared;
  Counters counters;
#if defined(__SANITIZE_ADDRESS__)
  void* main_asan_stack = nullptr;
  const void* main_bottom = nullptr;
  std::size_t main_size = 0;
#endif
#if defined(WEFT_EMU_TSAN)
  void* tsan_main = nullptr;
  std::vector<void*> tsan_fibers;  // of all threads of the grid
  int first_tsan_fiber = 0;        // of the block
  SharedBytes arena;               // of its static arrays: a fiber must not allocate
  std::size_t arena_used = 0;
  struct ArenaArray {
    Where where;
    std::size_t bytes;
    std::byte* data;
  };
  std::array<ArenaArray, kMaxStaticArrays> tsan_shared;
  int num_tsan_shared = 0;
#endif
};

Machine& ThisMachine() {
  thread_local std::unique_ptr<Machine> machine;
  if (machine == nullptr) machine = std::make_unique<Machine>();
  return *machine;
}
thread_local constinit Machine* machine_of_grid = nullptr;

std::uint64_t Random(Machine& m) {  // splitmix64
  std::uint64_t z = (m.random += 0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

void MarkReady(Machine& m, int index) { m.ready[index / 64] |= std::uint64_t{1} << index % 64; }
void MarkWaiting(Machine& m, int index) {
  m.ready[index / 64] &= ~(std::uint64_t{1} << index % 64);
}

// The first ready thread from `from` upwards, around the end; -1 if there is none.
int NextReady(const Machine& m, int from) {
  constexpr int kWords = kMaxThreads / 64;
  from %= kMaxThreads;
  for (int i = 0; i <= kWords; ++i) {
    const int word = (from / 64 + i) % kWords;
    std::uint64_t bits = m.ready[word];
    if (i == 0) bits &= ~std::uint64_t{0} << from % 64;
    if (bits != 0) return word * 64 + std::countr_zero(bits);
  }
  return -1;
}

int LastReady(const Machine& m, int below) {  // likewise downwards, from `below` - 1
  constexpr int kWords = kMaxThreads / 64;
  const int from = (below - 1 + kMaxThreads) % kMaxThreads;
  for (int i = 0; i <= kWords; ++i) {
    const int word = (from / 64 - i + 2 * kWords) % kWords;
    std::uint64_t bits = m.ready[word];
    if (i == 0) bits &= ~std::uint64_t{0} >> (63 - from % 64);
    if (bits != 0) return word * 64 + 63 - std::countl_zero(bits);
  }
  return -1;
}

int PickNext(Machine& m) {
  const int current = m.current == nullptr ? -1 : m.current->index;
  switch (m.order) {
    case Order::kFifo:
      return NextReady(m, current + 1);
    case Order::kReversed:
      return LastReady(m, current < 0 ? m.num_threads : current);
    case Order::kRandom:
      return NextReady(m, static_cast<int>(Random(m) % static_cast<unsigned>(m.num_threads)));
    case Order::kLowestWarpAhead:
      return NextReady(m, 0);
    case Order::kHighestWarpAhead: {
      const int last = LastReady(m, kMaxThreads);
      return last < 0 ? -1 : NextReady(m, last / kWarpSize * kWarpSize);
    }
  }
  return -1;
}

#if defined(__SANITIZE_ADDRESS__)
// After a switch to main or to a fiber; `stack` is what the switch away from it saved.
void AsanArrived(Machine& m, void* stack) {
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(stack, &bottom, &size);
  if (m.main_bottom == nullptr) {
    m.main_bottom = bottom;
    m.main_size = size;
  }
}
#endif

// `from` is null for main; `ends` when the fiber never runs again.
void SwitchTo(Machine& m, Fiber* from, Fiber* to, bool ends) {
  (void)ends;
  fcontext_t* slot = from == nullptr ? &m.main_context : &from->context;
  m.current = to;
  current_thread = to == nullptr ? nullptr : &to->view;
#if defined(__SANITIZE_ADDRESS__)
  void** save = from == nullptr ? &m.main_asan_stack : &from->asan_stack;
  const void* bottom = to == nullptr ? m.main_bottom : m.stacks + to->index * kStackBytes;
  __sanitizer_start_switch_fiber(ends ? nullptr : save, bottom,
                                 to == nullptr ? m.main_size : kStackBytes);
#endif
#if defined(WEFT_EMU_TSAN)
  constexpr unsigned kNoSync = 1;
  __tsan_switch_to_fiber(
      to == nullptr ? m.tsan_main : m.tsan_fibers[m.first_tsan_fiber + to->index], kNoSync);
#endif
  const transfer_t came = jump_fcontext(to == nullptr ? m.main_context : to->context, slot);
  // Back again, from whoever switched here.
  *static_cast<fcontext_t*>(came.data) = came.fctx;
#if defined(__SANITIZE_ADDRESS__)
  AsanArrived(m, *save);
#endif
}

std::string WhoWaits(const Machine& m) {
  std::string text = "deadlock:";
  std::vector<bool> told(m.num_threads);
  int returned = 0;
  for (int i = 0; i < m.num_threads; ++i) {
    const Fiber& fiber = m.fibers[i];
    if (fiber.done) ++returned;
    if (fiber.done || told[i]) continue;
    int count = 0;
    for (int j = i; j < m.num_threads; ++j) {
      const Fiber& other = m.fibers[j];
      if (other.done || !SamePlace(other.where, fiber.where) || other.mask != fiber.mask) continue;
      told[j] = true;
      ++count;
    }
    text += fmt::format(" {} threads wait at {} ({}", count, fiber.waits_for, Line(fiber.where));
    if (fiber.mask != 0) text += fmt::format(", mask {:#010x}", fiber.mask);
    text += fmt::format(", the first is thread {});", i);
  }
  return text + fmt::format(" {} have returned", returned);
}

void RunAnother(Machine& m, bool ends) {
  Fiber* self = m.current;
  const int next = PickNext(m);
  if (next >= 0) {
    if (next != self->index) SwitchTo(m, self, &m.fibers[next], ends);
    return;
  }
  if (m.num_live > 0) Fail(WhoWaits(m));
  SwitchTo(m, self, nullptr, ends);
}

void Wait(Machine& m, const char* operation, const Where& where, std::uint32_t mask) {
  Fiber& self = *m.current;
  self.waits_for = operation;
  self.where = where;
  self.mask = mask;
  MarkWaiting(m, self.index);
  RunAnother(m, false);
}

void Wake(Machine& m, int index) {
  m.fibers[index].waits_for = nullptr;
  MarkReady(m, index);
}

void FiberMain(transfer_t came) {
  *static_cast<fcontext_t*>(came.data) = came.fctx;
  Machine& m = *machine_of_grid;
#if defined(__SANITIZE_ADDRESS__)
  AsanArrived(m, nullptr);
#endif
  Fiber& self = *m.current;
  Acquire(&m.ready);
  (*m.thread_main)();
  Release(&m);
  if (self.num_copies != 0) Fail("a thread returned with cp.async copies that nobody waited for");
  self.done = true;
  MarkWaiting(m, self.index);
  --m.num_live;
  if (m.barrier_arrived > 0) {
    Fail(fmt::format("thread {} returned while others wait at __syncthreads ({})", self.index,
                     Line(m.barrier_where)));
  }
  RunAnother(m, true);
  __builtin_unreachable();
}

void StartFiber(Machine& m, int index, dim3 grid, dim3 block, uint3 block_idx) {
  Fiber& fiber = m.fibers[index];
  const auto i = static_cast<unsigned>(index);
  fiber.view = {.thread_idx = {i % block.x, i / block.x % block.y, i / block.x / block.y},
                .block_idx = block_idx,
                .block_dim = block,
                .grid_dim = grid,
                .lane = index % kWarpSize};
  fiber.index = index;
  fiber.done = false;
  fiber.waits_for = nullptr;
  fiber.num_copies = fiber.num_groups = 0;
  fiber.asan_stack = nullptr;
#if defined(WEFT_EMU_TSAN)
  std::byte* stack = m.stacks + (m.first_tsan_fiber + index) * kStackBytes;
#else
  std::byte* stack = m.stacks + index * kStackBytes;
#endif
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStackBytes);  // a fault may have left it as it was
#endif
  fiber.context = make_fcontext(stack + kStackBytes, kStackBytes, FiberMain);
  MarkReady(m, index);
}

void RunBlock(Machine& m, dim3 grid, dim3 block, std::size_t dynamic_bytes, uint3 block_idx) {
  m.num_threads = static_cast<int>(block.x * block.y * block.z);
  m.num_live = m.num_threads;
  m.barrier_arrived = 0;
  m.ready.fill(0);
  for (int i = 0; i < m.num_threads; ++i) StartFiber(m, i, grid, block, block_idx);
  for (int w = 0; w < (m.num_threads + kWarpSize - 1) / kWarpSize; ++w) m.warps[w].num_meets = 0;
  m.dynamic_shared = NaNs(dynamic_bytes);
#if defined(WEFT_EMU_TSAN)
  m.arena = NaNs(kTsanArenaBytes);
  m.arena_used = 0;
  m.num_tsan_shared = 0;
#endif
  Release(&m.ready);
  m.current = nullptr;
  const int first = PickNext(m);
  SwitchTo(m, nullptr, &m.fibers[first], false);
  for (SharedArray& array : m.shared) m.old_shared.push_back(std::move(array));
  m.shared.clear();
  m.old_shared.push_back({Where(), dynamic_bytes, std::move(m.dynamic_shared)});
#if defined(WEFT_EMU_TSAN)
  m.old_shared.push_back({Where(), kTsanArenaBytes, std::move(m.arena)});
#else
  m.old_shared.clear();
#endif
}

std::string CheckLaunch(dim3 grid, dim3 block, std::size_t dynamic_bytes) {
  const auto threads = std::uint64_t{block.x} * block.y * block.z;
  const auto blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    return fmt::format("invalid configuration: {} threads a block, allowed are 1 to {}", threads,
                       kMaxThreads);
  }
  if (blocks == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535) {
    return fmt::format("invalid configuration: a grid of {} x {} x {} blocks", grid.x, grid.y,
                       grid.z);
  }
  if (dynamic_bytes > kMaxSharedBytes) {
    return fmt::format("invalid configuration: {} bytes of shared memory, allowed are {}",
                       dynamic_bytes, kMaxSharedBytes);
  }
  return "";
}

#if defined(WEFT_EMU_TSAN)
// The race detector's idea of all threads of a grid: none of them knows of another's end, so that
// blocks count as running at once.
class TsanGrid {
 public:
  TsanGrid(Machine& m, std::int64_t num_threads) : m_(m) {
    CHECK_MSG(num_threads <= kNumStacks,
              fmt::format("{} threads in a grid, TSan's limit is {}; draw smaller cases",
                          num_threads, kNumStacks));
    m.tsan_main = __tsan_get_current_fiber();
    m.first_tsan_fiber = 0;
    Release(&m);
    for (std::int64_t i = 0; i < num_threads; ++i) m.tsan_fibers.push_back(__tsan_create_fiber(0));
  }
  ~TsanGrid() {
    Acquire(&m_);
    for (void* fiber : m_.tsan_fibers) __tsan_destroy_fiber(fiber);
    m_.tsan_fibers.clear();
  }

 private:
  Machine& m_;
};
#endif

}  // namespace

const char* OrderName(Order order) {
  constexpr const char* kNames[] = {"fifo", "reversed", "random", "lowest_warp_ahead",
                                    "highest_warp_ahead"};
  return kNames[static_cast<int>(order)];
}

void SetOrder(Order order, std::uint64_t seed) {
  Machine& m = ThisMachine();
  m.order = order;
  m.random = seed;
}

std::string RunGrid(dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                    const std::function<void()>& thread_main) {
  Machine& m = ThisMachine();
  machine_of_grid = &m;
  if (std::string error = CheckLaunch(grid, block, dynamic_shared_bytes); !error.empty())
    return error;
  CountLaunch();
  m.thread_main = &thread_main;
  m.failed = false;
  m.message = {};
  const std::int64_t num_blocks = std::int64_t{grid.x} * grid.y * grid.z;
#if defined(WEFT_EMU_TSAN)
  const int block_threads = static_cast<int>(block.x * block.y * block.z);
  TsanGrid tsan(m, num_blocks * block_threads);
#endif
  const bool backwards = m.order == Order::kReversed || m.order == Order::kHighestWarpAhead;
  for (std::int64_t i = 0; i < num_blocks && !m.failed; ++i) {
    const auto at = static_cast<std::uint64_t>(backwards ? num_blocks - 1 - i : i);
    RunBlock(m, grid, block, dynamic_shared_bytes,
             {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
              static_cast<unsigned>(at / grid.x / grid.y)});
#if defined(WEFT_EMU_TSAN)
    m.first_tsan_fiber += block_threads;
#endif
  }
#if defined(WEFT_EMU_TSAN)
  Acquire(&m);
#endif
  m.old_shared.clear();
  return m.message;
}

void Fail(std::string message) {
  Machine& m = *machine_of_grid;
  CHECK_MSG(m.current != nullptr, message);
  const ThreadView& view = m.current->view;
  m.failed = true;
  m.message = std::exchange(message, {});
  m.message += fmt::format(" [block {},{},{} thread {}]", view.block_idx.x, view.block_idx.y,
                           view.block_idx.z, m.current->index);
  Release(&m);
  // The other fibers are left where they are, as is what this one has on its stack (so nothing
  // there may own memory): stacks are only reused.
  SwitchTo(m, m.current, nullptr, true);
  __builtin_unreachable();
}

void* StaticShared(std::size_t bytes, Where where) {
  Machine& m = *machine_of_grid;
#if defined(WEFT_EMU_TSAN)
  for (int i = 0; i < m.num_tsan_shared; ++i) {
    if (m.tsan_shared[i].bytes == bytes && SamePlace(m.tsan_shared[i].where, where))
      return m.tsan_shared[i].data;
  }
  CHECK(m.num_tsan_shared < kMaxStaticArrays);
#else
  for (SharedArray& array : m.shared) {
    if (array.bytes == bytes && SamePlace(array.where, where)) return array.data.get();
  }
#endif
#if defined(WEFT_EMU_TSAN)
  std::byte* data = m.arena.get() + m.arena_used;
  m.arena_used += (bytes + 127) / 128 * 128;
  CHECK(m.arena_used <= kTsanArenaBytes);
  m.tsan_shared[m.num_tsan_shared++] = {where, bytes, data};
  return data;
#else
  m.shared.push_back({where, bytes, NaNs(bytes)});
  return m.shared.back().data.get();
#endif
}

void* DynamicShared() { return machine_of_grid->dynamic_shared.get(); }

void BlockBarrier(Where where) {
  Machine& m = *machine_of_grid;
  // Two in turn: who leaves late must not learn of who came to the next barrier.
  void* const order = &m.barrier_order[m.barriers_passed % 2];
  Release(order);
  if (m.barrier_arrived > 0 && !SamePlace(where, m.barrier_where)) {
    Fail(fmt::format("divergent __syncthreads: {} threads wait at {}, thread {} came to {}",
                     m.barrier_arrived, Line(m.barrier_where), m.current->index, Line(where)));
  }
  if (m.num_live < m.num_threads) {
    Fail(fmt::format("__syncthreads ({}) after {} threads of the block have returned", Line(where),
                     m.num_threads - m.num_live));
  }
  m.barrier_where = where;
  if (++m.barrier_arrived == m.num_threads) {
    m.barrier_arrived = 0;
    ++m.barriers_passed;
    for (int i = 0; i < m.num_threads; ++i) Wake(m, i);
    RunAnother(m, false);
  } else {
    Wait(m, "__syncthreads", where, 0);
  }
  Acquire(order);
}

void CheckLane(std::uint32_t mask, int lane, const char* operation, Where where) {
  if ((mask >> lane & 1) != 0) return;
  Fail(fmt::format("{} ({}) reads lane {}, which is not in its mask {:#010x}", operation,
                   Line(where), lane, mask));
}

const LaneData* WarpMeet(std::uint32_t mask, const char* operation, Where where, Memory memory,
                         const void* data, std::size_t bytes, Finish finish) {
  Machine& m = *machine_of_grid;
  Fiber& self = *m.current;
  const int lane = self.view.lane;
  if ((mask >> lane & 1) == 0) {
    Fail(fmt::format("{} ({}): lane {} is not in its own mask {:#010x}", operation, Line(where),
                     lane, mask));
  }
  Warp& warp = m.warps[self.index / kWarpSize];
  Meet* meet = nullptr;
  for (int i = 0; i < warp.num_meets && meet == nullptr; ++i) {
    if (warp.meets[i].mask == mask) meet = &warp.meets[i];
  }
  if (meet == nullptr) {
    if (warp.num_meets == kMaxMeets) Fail("a warp meets with more masks than the emulation keeps");
    meet = &warp.meets[warp.num_meets++];
    meet->mask = mask;
    meet->arrived = 0;
    meet->buffer = 0;
  }
  if (meet->arrived == 0) {
    meet->operation = operation;
    meet->where = where;
  } else if (std::string_view(meet->operation) != operation || !SamePlace(where, meet->where)) {
    Fail(fmt::format(
        "a warp's lanes met apart: lanes {:#010x} wait at {} ({}), lane {} came to {} ({})",
        meet->arrived, meet->operation, Line(meet->where), lane, operation, Line(where)));
  }
  LaneData* lanes = meet->lanes[meet->buffer];
  PutLane(lanes, lane, data, bytes);
  meet->arrived |= std::uint32_t{1} << lane;
  if (memory == Memory::kOrdered) Release(lanes);
  if (meet->arrived == mask) {
    if (finish != nullptr) finish(mask, lanes);
    meet->arrived = 0;
    meet->buffer ^= 1;
    const int first = self.index / kWarpSize * kWarpSize;
    for (int i = 0; i < kWarpSize; ++i) {
      if ((mask >> i & 1) != 0) Wake(m, first + i);
    }
    RunAnother(m, false);
  } else {
    Wait(m, operation, where, mask);
  }
  if (memory == Memory::kOrdered) Acquire(lanes);
  return lanes;
}

std::uint32_t Ballot(std::uint32_t mask, bool vote, const char* operation, Where where) {
  const int lane = machine_of_grid->current->view.lane;
  const std::uint32_t own = vote ? std::uint32_t{1} << lane : 0;
  const LaneData* lanes = WarpMeet(mask, operation, where, Memory::kUnordered, &own, sizeof(own));
  std::uint32_t all = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    std::uint32_t one = 0;
    if ((mask >> i & 1) != 0) TakeLane(lanes, i, &one, sizeof(one));
    all |= one;
  }
  return all;
}

// A loop, since memcpy would be seen by the race detector.
void TakeLane(const LaneData* lanes, int lane, void* out, std::size_t bytes) {
  const auto* from = reinterpret_cast<const volatile std::byte*>(lanes + lane);
  auto* to = static_cast<volatile std::byte*>(out);
  for (std::size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

void PutLane(LaneData* lanes, int lane, const void* data, std::size_t bytes) {
  TakeLane(reinterpret_cast<const LaneData*>(data), 0, lanes[lane].bytes, bytes);
}

void CopyAsync(void* to, const void* from, std::uint32_t bytes, std::uint32_t valid_bytes) {
  Fiber& self = *machine_of_grid->current;
  if (self.num_copies == kMaxCopies)
    Fail("more cp.async copies in flight than the emulation keeps");
  if (reinterpret_cast<std::uintptr_t>(to) % bytes != 0 ||
      (valid_bytes != 0 && reinterpret_cast<std::uintptr_t>(from) % bytes != 0)) {
    Fail(fmt::format("cp.async of {} bytes between addresses that are not aligned to them", bytes));
  }
  NoteWrite(to, bytes);
  std::memset(to, 0xFF, bytes);
  self.copies[self.num_copies++] = {to, from, bytes, valid_bytes};
}

void CopyAsyncCommit() {
  Fiber& self = *machine_of_grid->current;
  if (self.num_groups == kMaxCopyGroups)
    Fail("more cp.async groups in flight than the emulation keeps");
  self.group_end[self.num_groups++] = self.num_copies;
}

void CopyAsyncWait(int groups_in_flight) {
  Machine& m = *machine_of_grid;
  Fiber& self = *m.current;
  const int done_groups = self.num_groups - groups_in_flight;
  if (done_groups <= 0) return;
  const int end = self.group_end[done_groups - 1];
  for (int i = 0; i < end; ++i) {
    const AsyncCopy& copy = self.copies[i];
    NoteRead(copy.from, copy.valid_bytes);
    NoteWrite(copy.to, copy.bytes);
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.valid_bytes);
    m.counters.global_read_bytes += copy.valid_bytes;
  }
  for (int i = end; i < self.num_copies; ++i) self.copies[i - end] = self.copies[i];
  for (int i = done_groups; i < self.num_groups; ++i)
    self.group_end[i - done_groups] = self.group_end[i] - end;
  self.num_copies -= end;
  self.num_groups -= done_groups;
}

#if defined(WEFT_EMU_TSAN)
void NoteRead(const void* data, std::size_t bytes) {
  if (bytes > 0) __tsan_read_range(const_cast<void*>(data), bytes);
}
void NoteWrite(void* data, std::size_t bytes) { __tsan_write_range(data, bytes); }
#else
void NoteRead(const void*, std::size_t) {}
void NoteWrite(void*, std::size_t) {}
#endif

const Counters& CountersOfThread() { return ThisMachine().counters; }
void ResetCounters() { ThisMachine().counters = {}; }

void CountLaunch() { ++ThisMachine().counters.launches; }

void CountGlobal(std::int64_t read_bytes, std::int64_t written_bytes) {
  Counters& counters = machine_of_grid->counters;
  counters.global_read_bytes += read_bytes;
  counters.global_written_bytes += written_bytes;
}

void CountMatrixLoad(std::int64_t bank_conflicts) {
  Counters& counters = machine_of_grid->counters;
  ++counters.matrix_loads;
  counters.bank_conflicts += bank_conflicts;
}

}  // namespace weft::cuda_emu
