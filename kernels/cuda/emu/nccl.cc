#include "kernels/cuda/emu/nccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "fmt/format.h"
#include "server/base/mutex.h"

namespace weft::cuda_emu {
namespace {

using kernels::cuda::NcclApi;
using kernels::cuda::NcclConfig;
using kernels::cuda::NcclDataType;
using kernels::cuda::NcclRedOp;
using kernels::cuda::NcclResult;
using kernels::cuda::NcclUniqueId;
using kernels::cuda::NcclWindow;
using enum kernels::cuda::NcclResult;

constexpr int kMaxRanks = 16;
constexpr std::uint64_t kMaxWindows = 64;
constexpr std::size_t kSlotBytes = std::size_t{64} << 20;  // of address space; pages come as used

enum class Kind : std::uint32_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kGroup };
const char* KindName(Kind kind) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter",
                                    "ncclAlltoAll", "ncclSend and ncclRecv"};
  return kNames[static_cast<int>(kind)];
}

// What all ranks have to do alike. A group has no count of its own.
struct Call {
  Kind kind;
  NcclDataType type;
  std::size_t count;
  friend bool operator==(const Call&, const Call&) = default;
};
std::size_t SizeOf(NcclDataType type) {
  return type == NcclDataType::kNcclFloat32 ? sizeof(float) : 1;
}
std::string Text(int rank, const Call& call) {
  return fmt::format("rank {} calls {} of {} {}", rank, KindName(call.kind), call.count,
                     call.type == NcclDataType::kNcclFloat32 ? "floats" : "bytes");
}

// A rank's part of a collective, to be read by the others until it has posted the one after the
// next: which it does after the next is complete, and that takes everybody's part.
struct Post {
  Call call;
  std::size_t sends[kMaxRanks];  // kGroup: bytes to each rank, one after the other
};
struct RankState {
  std::atomic<std::uint64_t> posted;  // collectives
  std::atomic<bool> joined;
  std::atomic<bool> ended;
  std::atomic<std::uint64_t> windows;  // that it has registered, ever
  std::size_t window_bytes[kMaxWindows];
  Post posts[2];
};
struct Shared {
  std::atomic<int> num_joined;
  std::atomic<bool> closed;  // the descriptor that the id names
  RankState ranks[kMaxRanks];
};
constexpr std::size_t kHeaderBytes = std::size_t{1} << 16;
static_assert(sizeof(Shared) <= kHeaderBytes);
constexpr std::size_t kSharedBytes = kHeaderBytes + 2 * kMaxRanks * kSlotBytes;

// An id: the memory, as its maker has it.
struct Id {
  pid_t pid;
  int descriptor;
};

struct State {
  ~State() {
    if (shared != nullptr) munmap(shared, kSharedBytes);
  }
  std::byte* Slot(int r, std::uint64_t collective) const {
    return reinterpret_cast<std::byte*>(shared) + kHeaderBytes +
           (static_cast<std::size_t>(r) * 2 + collective % 2) * kSlotBytes;
  }
  const Post& PostOf(int r) const { return shared->ranks[r].posts[done % 2]; }
  void Fail(NcclResult error, std::string message) {
    result = error;
    text = std::move(message);
  }

  Shared* shared = nullptr;
  Id id{};
  int rank = 0;
  int size = 0;
  std::uint64_t done = 0;                              // collectives
  std::uint64_t windows = 0;                           // that were registered, ever
  std::map<const std::byte*, std::size_t> registered;  // those that are
  NcclResult result = kNcclInProgress;
  std::string text;
  bool ended = false;
};

}  // namespace
}  // namespace weft::cuda_emu

struct weft::kernels::cuda::NcclComm {
  std::shared_ptr<cuda_emu::State> state;
};

namespace weft::cuda_emu {
namespace {

using kernels::cuda::NcclComm;

struct Part {
  std::byte* data;
  std::size_t bytes;
};

// A collective of a rank, which runs once for each time that it is launched.
struct Operation {
  std::shared_ptr<State> state;
  Call call;
  const std::byte* in = nullptr;
  std::size_t in_bytes = 0;
  std::byte* out = nullptr;
  Part sends[kMaxRanks] = {};  // kGroup, by rank
  Part receives[kMaxRanks] = {};
  bool posted = false;

  cudaError_t Run();

 private:
  void Send();
  bool AllHavePosted();
  bool AllAgree();
  void Receive();
  void Sum(float* to, std::size_t from_offset) const;
};

void Operation::Send() {
  State& s = *state;
  RankState& own = s.shared->ranks[s.rank];
  Post& post = own.posts[s.done % 2];
  post = {.call = call, .sends = {}};
  std::byte* to = s.Slot(s.rank, s.done);
  if (in_bytes > 0) std::memcpy(to, in, in_bytes);
  for (int r = 0; r < s.size && call.kind == Kind::kGroup; ++r) {
    if (sends[r].bytes > 0) std::memcpy(to, sends[r].data, sends[r].bytes);
    to += sends[r].bytes;
    post.sends[r] = sends[r].bytes;
  }
  own.posted.store(s.done + 1, std::memory_order_release);
  posted = true;
}

bool Operation::AllHavePosted() {
  State& s = *state;
  for (int r = 0; r < s.size; ++r) {
    RankState& other = s.shared->ranks[r];
    const bool ended = other.ended.load(std::memory_order_acquire);
    if (other.posted.load(std::memory_order_acquire) > s.done) continue;
    if (ended) s.Fail(kNcclRemoteError, fmt::format("rank {} has aborted", r));
    return false;
  }
  return true;
}

bool Operation::AllAgree() {
  State& s = *state;
  for (int r = 0; r < s.size; ++r) {
    const Post& post = s.PostOf(r);
    if (post.call != call) {
      s.Fail(kNcclInvalidUsage, Text(r, post.call) + ", " + Text(s.rank, call));
      return false;
    }
    if (call.kind == Kind::kGroup && post.sends[s.rank] != receives[r].bytes) {
      s.Fail(kNcclInvalidUsage, fmt::format("rank {} sends {} bytes to rank {}, which expects {}",
                                            r, post.sends[s.rank], s.rank, receives[r].bytes));
      return false;
    }
  }
  return true;
}

void Operation::Sum(float* to, std::size_t from_offset) const {
  const State& s = *state;
  for (std::size_t i = 0; i < call.count; ++i) {
    float sum = 0;
    for (int r = 0; r < s.size; ++r) {
      float part = 0;
      std::memcpy(&part, s.Slot(r, s.done) + (from_offset + i) * sizeof(float), sizeof(float));
      sum = r == 0 ? part : sum + part;
    }
    to[i] = sum;
  }
}

void Operation::Receive() {
  const State& s = *state;
  const std::size_t bytes = call.count * SizeOf(call.type);
  const auto own = static_cast<std::size_t>(s.rank);
  if (call.kind == Kind::kAllReduce) Sum(reinterpret_cast<float*>(out), 0);
  if (call.kind == Kind::kReduceScatter) Sum(reinterpret_cast<float*>(out), own * call.count);
  for (int r = 0; r < s.size; ++r) {
    const std::byte* from = s.Slot(r, s.done);
    std::byte* to = out + static_cast<std::size_t>(r) * bytes;
    if (call.kind == Kind::kAllGather && bytes > 0) std::memcpy(to, from, bytes);
    if (call.kind == Kind::kAllToAll && bytes > 0) std::memcpy(to, from + own * bytes, bytes);
    if (call.kind != Kind::kGroup || receives[r].bytes == 0) continue;
    for (int before = 0; before < s.rank; ++before) from += s.PostOf(r).sends[before];
    std::memcpy(receives[r].data, from, receives[r].bytes);
  }
}

cudaError_t Operation::Run() {
  State& s = *state;
  if (!s.ended) {
    if (s.result != kNcclSuccess) return cudaErrorNotReady;
    if (!posted && TakeFault(fmt::format("collective {}", s.rank))) {
      s.Fail(kNcclSystemError, "the link is down, for a test");
      return cudaErrorNotReady;
    }
    if (!posted) Send();
    if (!AllHavePosted() || !AllAgree()) return cudaErrorNotReady;
    Receive();
    ++s.done;
  }
  posted = false;
  return cudaSuccess;
}

// Whether a collective may use it.
bool IsUsable(const State& s, const void* data, std::size_t bytes) {
  if (bytes == 0 || s.registered.empty()) return bytes == 0 || IsDeviceMemory(data, bytes);
  const auto* const at = static_cast<const std::byte*>(data);
  auto window = s.registered.upper_bound(at);
  if (window == s.registered.begin()) return false;
  --window;
  return at + bytes <= window->first + window->second;
}

NcclResult Invalid(NcclComm* comm, std::string text) {
  comm->state->text = std::move(text);
  return kNcclInvalidArgument;
}

NcclResult EnqueueCall(const Call& call, const void* in, std::size_t in_bytes, void* out,
                       std::size_t out_bytes, NcclComm* comm, cudaStream_t stream) {
  if (in_bytes > kSlotBytes) {
    return Invalid(comm, fmt::format("{} bytes; the emulation takes {}", in_bytes, kSlotBytes));
  }
  if (!IsUsable(*comm->state, in, in_bytes) || !IsUsable(*comm->state, out, out_bytes)) {
    return Invalid(comm, fmt::format("{}: no device memory{}", KindName(call.kind),
                                     comm->state->registered.empty() ? "" : " of a window"));
  }
  auto operation = std::make_shared<Operation>();
  operation->state = comm->state;
  operation->call = call;
  operation->in = static_cast<const std::byte*>(in);
  operation->in_bytes = in_bytes;
  operation->out = static_cast<std::byte*>(out);
  Enqueue(stream, [operation] { return operation->Run(); });
  return kNcclSuccess;
}

NcclResult GetUniqueId(NcclUniqueId* id) {
  const Id made = {.pid = getpid(), .descriptor = memfd_create("weft-nccl", MFD_CLOEXEC)};
  if (made.descriptor < 0 || ftruncate(made.descriptor, kSharedBytes) != 0) return kNcclSystemError;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, &made, sizeof(made));
  return kNcclSuccess;
}

NcclResult CommInitRankConfig(NcclComm** comm, int num_ranks, NcclUniqueId id, int rank,
                              NcclConfig* config) {
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks ||
      config->magic != NcclConfig().magic || config->blocking != 0) {
    return kNcclInvalidArgument;
  }
  auto state = std::make_shared<State>();
  std::memcpy(&state->id, id.internal, sizeof(state->id));
  const std::string path = fmt::format("/proc/{}/fd/{}", state->id.pid, state->id.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* const memory = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (descriptor >= 0) close(descriptor);
  if (memory == MAP_FAILED) return kNcclSystemError;
  state->shared = static_cast<Shared*>(memory);
  state->rank = rank;
  state->size = num_ranks;
  if (state->shared->ranks[rank].joined.exchange(true)) return kNcclInvalidUsage;
  ++state->shared->num_joined;
  *comm = new NcclComm{std::move(state)};
  return kNcclInProgress;
}

// Also fails where they are not alike.
bool AllHaveWindows(State& s) {
  for (int r = 0; r < s.size && s.windows > 0; ++r) {
    const RankState& other = s.shared->ranks[r];
    if (other.windows.load(std::memory_order_acquire) < s.windows) return false;
    const std::size_t own = s.shared->ranks[s.rank].window_bytes[s.windows - 1];
    const std::size_t theirs = other.window_bytes[s.windows - 1];
    if (own == theirs) continue;
    s.Fail(kNcclInvalidUsage, fmt::format("rank {} registers a window of {} bytes, rank {} of {}",
                                          r, theirs, s.rank, own));
    return false;
  }
  return true;
}

// Moves on what does not wait for a stream.
NcclResult CommGetAsyncError(NcclComm* comm, NcclResult* error) {
  State& s = *comm->state;
  if (s.result == kNcclInProgress) {
    for (int r = 0; r < s.size; ++r) {
      if (s.shared->ranks[r].ended) s.Fail(kNcclRemoteError, fmt::format("rank {} has aborted", r));
    }
    if (s.shared->num_joined == s.size && AllHaveWindows(s)) s.result = kNcclSuccess;
    // Everybody has it: the memory goes with the last of them.
    if (s.result == kNcclSuccess && getpid() == s.id.pid && !s.shared->closed.exchange(true)) {
      close(s.id.descriptor);
    }
  }
  *error = s.result;
  return kNcclSuccess;
}

// What ncclMemAlloc() has given, which alone can be symmetric.
struct SymmetricMemory {
  Mutex mutex;
  std::set<const void*> all ABSL_GUARDED_BY(mutex);
};
SymmetricMemory& TheSymmetricMemory() {
  static auto* const memory = new SymmetricMemory;
  return *memory;
}

NcclResult MemAlloc(void** data, std::size_t bytes) {
  if (cudaMalloc(data, bytes) != cudaSuccess) return kNcclUnhandledCudaError;
  MutexLock lock(TheSymmetricMemory().mutex);
  TheSymmetricMemory().all.insert(*data);
  return kNcclSuccess;
}

NcclResult MemFree(void* data) {
  MutexLock lock(TheSymmetricMemory().mutex);
  if (TheSymmetricMemory().all.erase(data) == 0) return kNcclInvalidArgument;
  return cudaFree(data) == cudaSuccess ? kNcclSuccess : kNcclUnhandledCudaError;
}

NcclResult CommWindowRegister(NcclComm* comm, void* data, std::size_t bytes, NcclWindow** window,
                              int flags) {
  State& s = *comm->state;
  {
    MutexLock lock(TheSymmetricMemory().mutex);
    if (!TheSymmetricMemory().all.contains(data) || flags != kernels::cuda::kNcclWindowSymmetric) {
      return Invalid(comm, "a window of memory that is not ncclMemAlloc()'s");
    }
  }
  if (s.windows == kMaxWindows || !IsDeviceMemory(data, bytes)) {
    return Invalid(comm, fmt::format("window {} of {} bytes", s.windows, bytes));
  }
  RankState& own = s.shared->ranks[s.rank];
  own.window_bytes[s.windows] = bytes;
  own.windows.store(++s.windows, std::memory_order_release);
  s.registered[static_cast<const std::byte*>(data)] = bytes;
  *window = reinterpret_cast<NcclWindow*>(data);
  s.result = kNcclInProgress;
  return kNcclInProgress;
}

NcclResult CommWindowDeregister(NcclComm* comm, NcclWindow* window) {
  return comm->state->registered.erase(reinterpret_cast<const std::byte*>(window)) == 1
             ? kNcclSuccess
             : Invalid(comm, "no such window");
}

NcclResult CommAbort(NcclComm* comm) {
  State& s = *comm->state;
  s.ended = true;
  s.shared->ranks[s.rank].ended.store(true, std::memory_order_release);
  delete comm;
  return kNcclSuccess;
}

const char* GetErrorString(NcclResult result) {
  switch (result) {
    case kNcclSuccess:
      return "no error";
    case kNcclUnhandledCudaError:
      return "unhandled cuda error";
    case kNcclSystemError:
      return "unhandled system error";
    case kNcclInvalidArgument:
      return "invalid argument";
    case kNcclInvalidUsage:
      return "invalid usage";
    case kNcclRemoteError:
      return "remote process exited or there was a network error";
    case kNcclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown";
}

const char* GetLastError(NcclComm* comm) {
  return comm == nullptr ? "" : comm->state->text.c_str();
}

NcclResult AllReduce(const void* in, void* out, std::size_t count, NcclDataType type, NcclRedOp,
                     NcclComm* comm, cudaStream_t stream) {
  const std::size_t bytes = count * SizeOf(type);
  return EnqueueCall({Kind::kAllReduce, type, count}, in, bytes, out, bytes, comm, stream);
}

NcclResult AllGather(const void* in, void* out, std::size_t count, NcclDataType type,
                     NcclComm* comm, cudaStream_t stream) {
  const std::size_t bytes = count * SizeOf(type);
  return EnqueueCall({Kind::kAllGather, type, count}, in, bytes, out,
                     bytes * static_cast<std::size_t>(comm->state->size), comm, stream);
}

NcclResult ReduceScatter(const void* in, void* out, std::size_t count, NcclDataType type, NcclRedOp,
                         NcclComm* comm, cudaStream_t stream) {
  const std::size_t bytes = count * SizeOf(type);
  return EnqueueCall({Kind::kReduceScatter, type, count}, in,
                     bytes * static_cast<std::size_t>(comm->state->size), out, bytes, comm, stream);
}

NcclResult AllToAll(const void* in, void* out, std::size_t count, NcclDataType type, NcclComm* comm,
                    cudaStream_t stream) {
  const std::size_t bytes = count * SizeOf(type) * static_cast<std::size_t>(comm->state->size);
  return EnqueueCall({Kind::kAllToAll, type, count}, in, bytes, out, bytes, comm, stream);
}

// What this thread sends and receives between ncclGroupStart() and ncclGroupEnd(): to and from
// every rank at most once, in one communicator.
thread_local std::shared_ptr<Operation> group;
thread_local cudaStream_t group_stream = nullptr;

NcclResult GroupStart() {
  group = std::make_shared<Operation>();
  group->call = {Kind::kGroup, NcclDataType::kNcclUint8, 0};
  return kNcclSuccess;
}

NcclResult AddPart(Part* parts, int peer, void* data, std::size_t bytes, NcclComm* comm,
                   cudaStream_t stream) {
  if (peer < 0 || peer >= comm->state->size || !IsUsable(*comm->state, data, bytes) ||
      bytes > kSlotBytes / kMaxRanks) {
    return Invalid(comm, fmt::format("{} bytes with rank {}", bytes, peer));
  }
  group->state = comm->state;
  group_stream = stream;
  parts[peer] = {static_cast<std::byte*>(data), bytes};
  return kNcclSuccess;
}

NcclResult Send(const void* data, std::size_t count, NcclDataType type, int to, NcclComm* comm,
                cudaStream_t stream) {
  if (group == nullptr) return Invalid(comm, "the emulation sends in groups only");
  return AddPart(group->sends, to, const_cast<void*>(data), count * SizeOf(type), comm, stream);
}

NcclResult Receive(void* data, std::size_t count, NcclDataType type, int from, NcclComm* comm,
                   cudaStream_t stream) {
  if (group == nullptr) return Invalid(comm, "the emulation receives in groups only");
  return AddPart(group->receives, from, data, count * SizeOf(type), comm, stream);
}

NcclResult GroupEnd() {
  const std::shared_ptr<Operation> ended = std::exchange(group, nullptr);
  if (ended == nullptr) return kNcclInvalidUsage;
  if (ended->state == nullptr) return kNcclSuccess;
  Enqueue(group_stream, [ended] { return ended->Run(); });
  return kNcclSuccess;
}

}  // namespace

NcclApi EmulatedNccl() {
  return {.get_unique_id = GetUniqueId,
          .comm_init_rank_config = CommInitRankConfig,
          .comm_get_async_error = CommGetAsyncError,
          .comm_abort = CommAbort,
          .get_error_string = GetErrorString,
          .get_last_error = GetLastError,
          .group_start = GroupStart,
          .group_end = GroupEnd,
          .all_reduce = AllReduce,
          .all_gather = AllGather,
          .reduce_scatter = ReduceScatter,
          .send = Send,
          .receive = Receive,
          .all_to_all = AllToAll,
          .window_register = CommWindowRegister,
          .window_deregister = CommWindowDeregister,
          .mem_alloc = MemAlloc,
          .mem_free = MemFree};
}

}  // namespace weft::cuda_emu
