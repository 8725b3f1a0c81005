#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/ceil_div.h"
#include "server/base/check.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "worker/group/collective_rounds.h"
#include "worker/group/communicator.h"
#include "worker/group/rank_order_sum.h"
#include "worker/group/shared_windows.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;
using Flow = CollectiveRounds::Flow;

constexpr std::int64_t kFloatBytes = sizeof(float);

// An all-reduce up to this long is one round in which everybody sends everything to everybody,
// longer ones are a reduce-scatter and an all-gather. Measured with group_bench: with 2 ranks both
// ways move the same bytes; with more the direct way moves size / 2 times as many.
constexpr std::int64_t DirectBytes(int size) {
  return size == 2 ? std::int64_t{256} << 10 : std::int64_t{2} << 10;
}

// What a rank has for each other one, from here on they read it where it lies, if it lies in shared
// memory: no copies, but all wait for each other at the end once more. Measured with group_bench.
constexpr std::int64_t kSharedBytes = std::int64_t{64} << 10;

constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t to) { return CeilDiv(a, to) * to; }

// Chunks and slots start on cache lines.
constexpr std::int64_t kAlign = 64;

// The part of an all-reduce that each rank sums for all.
struct Chunks {
  Chunks(std::int64_t count, int size)
      : count(count), each(RoundUp(CeilDiv(count, size), kAlign / kFloatBytes)) {}

  std::int64_t begin(int r) const { return std::min(r * each, count); }
  std::int64_t length(int r) const { return begin(r + 1) - begin(r); }

  std::int64_t count;
  std::int64_t each;
};

// The most that one rank sends another in a round.
std::int64_t MaxFlowBytes(std::int64_t max_bytes, int size) {
  return RoundUp(std::max(std::min(DirectBytes(size), max_bytes), CeilDiv(max_bytes, size)),
                 kAlign);
}

std::byte* At(void* base, int r, std::int64_t bytes) {
  return static_cast<std::byte*>(base) + r * bytes;
}
const std::byte* At(const void* base, int r, std::int64_t bytes) {
  return static_cast<const std::byte*>(base) + r * bytes;
}

void CopyOwn(const void* in, void* out, std::int64_t bytes) {
  if (in != out && bytes > 0) std::memcpy(out, in, static_cast<std::size_t>(bytes));
}

class FabricCommunicator final : public Communicator {
 public:
  FabricCommunicator(const std::shared_ptr<CollectiveMux>& mux, int rank,
                     absl::Span<const PeerId> peers, absl::Span<const std::uint32_t> tags,
                     const FabricCommunicatorOptions& options)
      : options_(options),
        words_(std::make_shared<Words>()),
        windows_(std::make_shared<SharedWindows>(static_cast<int>(peers.size()))),
        their_handles_(peers.size()),
        their_places_(peers.size()),
        their_attached_(peers.size()),
        sources_(peers.size()),
        slot_bytes_(MaxFlowBytes(options.max_bytes, static_cast<int>(peers.size()))),
        rounds_(mux, rank, peers, tags, slot_bytes_, options),
        parts_(peers.size()),
        slots_(std::make_unique_for_overwrite<std::byte[]>(
            static_cast<std::size_t>(slot_bytes_ * size() + kAlign))) {
    CHECK(options.max_bytes > 0);
    mux->Keep(words_);
    mux->Keep(windows_);
  }

  int rank() const override { return rounds_.rank(); }
  int size() const override { return rounds_.size(); }

  absl::StatusOr<kernels::Buffer> Allocate(std::int64_t bytes, kernels::Stream& stream) override {
    const bool window = !met_ && stream.device() == kernels::DeviceKind::kCpu;
    return window ? windows_->Allocate(bytes) : kernels::Buffer::Allocate(bytes, stream);
  }

  absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                            kernels::Stream&) override {
    RETURN_IF_ERROR(CheckSum(dtype));
    RETURN_IF_ERROR(CheckBytes("AllReduceSum", count, kFloatBytes));
    return Measured([&] {
      float* const floats = static_cast<float*>(data);
      if (Shares(data, count * kFloatBytes, size())) return AllReduceShared(floats, count);
      return count * kFloatBytes <= DirectBytes(size()) ? AllReduceDirect(floats, count)
                                                        : AllReduceInTwo(floats, count);
    });
  }

  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("AllGather", bytes_per_rank, size()));
    return Measured([&]() -> absl::Status {
      CopyOwn(in, At(out, rank(), bytes_per_rank), bytes_per_rank);
      if (Shares(in, bytes_per_rank, 1)) {
        RETURN_IF_ERROR(ShowInput(kSharedAllGather, bytes_per_rank, in, bytes_per_rank));
        ForEachSource([&](int r, const std::byte* source) {
          Read(At(out, r, bytes_per_rank), source, bytes_per_rank);
        });
        return Barrier(kLeaveShared, bytes_per_rank);
      }
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        flow.Send(in, bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      return SymmetricRound(kAllGather, bytes_per_rank);
    });
  }

  absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank, DType dtype,
                                kernels::Stream&) override {
    RETURN_IF_ERROR(CheckSum(dtype));
    RETURN_IF_ERROR(CheckBytes("ReduceScatterSum", count_per_rank, size() * kFloatBytes));
    return Measured([&]() -> absl::Status {
      const std::int64_t bytes = count_per_rank * kFloatBytes;
      const auto* const own = reinterpret_cast<const float*>(At(in, rank(), bytes));
      float* const sums = static_cast<float*>(out);
      if (Shares(in, bytes * size(), size())) {
        RETURN_IF_ERROR(ShowInput(kSharedReduceScatter, bytes, in, bytes * size()));
        SumSources(own, rank() * count_per_rank, count_per_rank, sums);
        return Barrier(kLeaveShared, bytes);
      }
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        flow.Send(At(in, r, bytes), bytes);
        ReceiveToSum(r, flow, own, sums, bytes);
      });
      RETURN_IF_ERROR(SymmetricRound(kReduceScatter, bytes));
      SumSlots(own, count_per_rank, sums);
      return absl::OkStatus();
    });
  }

  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                        kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("AllToAll", bytes_per_rank, size()));
    return Measured([&]() -> absl::Status {
      CopyOwn(At(in, rank(), bytes_per_rank), At(out, rank(), bytes_per_rank), bytes_per_rank);
      if (Shares(in, bytes_per_rank * size(), size())) {
        RETURN_IF_ERROR(ShowInput(kSharedAllToAll, bytes_per_rank, in, bytes_per_rank * size()));
        ForEachSource([&](int r, const std::byte* source) {
          Read(At(out, r, bytes_per_rank), At(source, rank(), bytes_per_rank), bytes_per_rank);
        });
        return Barrier(kLeaveShared, bytes_per_rank);
      }
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        flow.Send(At(in, r, bytes_per_rank), bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      return SymmetricRound(kAllToAll, bytes_per_rank);
    });
  }

  absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                      kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("Gather", bytes_per_rank, size()));
    return Measured([&]() -> absl::Status {
      // Only rank 0 waits in a gather. So that the others cannot run away from it with a second
      // one right behind, that one starts with a word from rank 0.
      if (std::exchange(gathered_, true)) {
        rounds_.ForEachPeer([&](int r, Flow& flow) {
          if (rank() == 0) flow.Send(nullptr, 0);
          if (r == 0) flow.Receive(nullptr, 0);
        });
        RETURN_IF_ERROR(rounds_.Run(kGatherGo, bytes_per_rank));
      }
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        if (r == 0) flow.Send(in, bytes_per_rank);
        if (rank() == 0) flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      if (rank() == 0) CopyOwn(in, out, bytes_per_rank);
      return rounds_.Run(kGather, bytes_per_rank);
    });
  }

  CollectiveCounters Counters() const override {
    CollectiveCounters counters = counters_;
    counters.received_bytes = rounds_.received_bytes() - word_bytes_ + read_bytes_;
    return counters;
  }

  std::int64_t workspace_bytes() const override {
    return slot_bytes_ * size() + rounds_.staging_bytes();
  }

  void Abort() override { rounds_.Abort(); }

 private:
  absl::Status CheckSum(DType dtype) const {
    if (dtype == DType::kFloat32) return absl::OkStatus();
    return absl::UnimplementedError(
        fmt::format("sums over ranks are of float32 only, not {}", DTypeName(dtype)));
  }

  absl::Status CheckBytes(std::string_view what, std::int64_t count, std::int64_t unit) const {
    if (count >= 0 && count <= options_.max_bytes / unit) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("{} of {} times {} bytes; this communicator takes 0 to {} bytes", what, count,
                    unit, options_.max_bytes));
  }

  template <typename Body>
  absl::Status Measured(Body body) {
    const Clock::time_point start = Clock::now();
    absl::Status status = rounds_.CheckStatus();
    if (status.ok()) status = MeetWindows();
    if (status.ok()) status = body();
    counters_.waiting += absl::FromChrono(Clock::now() - start);
    if (!status.ok()) return status;
    ++counters_.operations;
    if (options_.progress != nullptr) options_.progress->fetch_add(1, std::memory_order_relaxed);
    return status;
  }

  // A round that nobody leaves before all have entered it.
  absl::Status SymmetricRound(Operation operation, std::int64_t bytes) {
    gathered_ = false;
    return rounds_.Run(operation, bytes);
  }

  // What is said about shared memory. Lives as long as the fabric.
  struct Words {
    SharedWindows::Handles handles;
    SharedWindows::Place place;
    std::uint64_t attached = 0;
  };

  // all[r] = rank r's `word`, but for this rank's.
  template <typename Word>
  absl::Status Tell(Operation operation, std::int64_t bytes, const Word& word,
                    std::vector<Word>& all) {
    rounds_.ForEachPeer([&](int r, Flow& flow) {
      flow.Send(&word, sizeof(word));
      flow.Receive(&all[static_cast<std::size_t>(r)], sizeof(word));
    });
    RETURN_IF_ERROR(SharedRound(operation, bytes));
    word_bytes_ += sizeof(word) * static_cast<std::uint64_t>(size() - 1);
    return absl::OkStatus();
  }

  // Before the first call: either all ranks read the memory of all others, or none does.
  absl::Status MeetWindows();

  // Whether a call takes its `bytes` of input, `parts` of which go different ways, from shared
  // memory: the same on all ranks.
  bool Shares(const void* in, std::int64_t bytes, int parts) const {
    return shares_ && bytes / parts >= kSharedBytes && windows_->Find(in, bytes).has_value();
  }
  // From when it returns, sources_ are what the ranks gave as `in`, until the next Barrier().
  absl::Status ShowInput(Operation operation, std::int64_t operation_bytes, const void* in,
                         std::int64_t bytes);
  // Returns when all ranks have called it: none reads this one's input any more.
  absl::Status Barrier(Operation operation, std::int64_t operation_bytes) {
    rounds_.ForEachPeer([&](int, Flow& flow) {
      flow.Send(nullptr, 0);
      flow.Receive(nullptr, 0);
    });
    return SharedRound(operation, operation_bytes);
  }
  // What ranks did with shared memory before the round, all see behind it, whatever fences the
  // fabric's messages come with.
  absl::Status SharedRound(Operation operation, std::int64_t bytes) {
    FenceSharedMemory();
    absl::Status status = SymmetricRound(operation, bytes);
    FenceSharedMemory();
    return status;
  }
  // body(r, source) for every other rank's input; starting behind ourselves, so that not all ranks
  // read rank 0's first.
  template <typename Body>
  void ForEachSource(Body body) {
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();
      body(r, sources_[static_cast<std::size_t>(r)]);
    }
  }
  void Read(void* to, const std::byte* from, std::int64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    read_bytes_ += static_cast<std::uint64_t>(bytes);
  }
  // out = the sum of `own` and the `count` floats from `first` on of every other rank's input.
  void SumSources(const float* own, std::int64_t first, std::int64_t count, float* out) {
    for (int r = 0; r < size(); ++r) {
      const auto* const source =
          reinterpret_cast<const float*>(sources_[static_cast<std::size_t>(r)]);
      parts_[static_cast<std::size_t>(r)] = r == rank() ? own : source + first;
    }
    RankOrderSum(parts_, count, out);
    read_bytes_ += static_cast<std::uint64_t>(count * kFloatBytes * (size() - 1));
  }

  absl::Status AllReduceShared(float* data, std::int64_t count);
  absl::Status AllReduceDirect(float* data, std::int64_t count);
  absl::Status AllReduceInTwo(float* data, std::int64_t count);

  std::byte* Slot(int r) {
    const auto base = reinterpret_cast<std::uintptr_t>(slots_.get());
    return slots_.get() + (kAlign - base % kAlign) % kAlign + r * slot_bytes_;
  }

  // Of what rank r sends; SumSlots() finishes the job.
  void ReceiveToSum(int r, Flow& flow, const float* own, float* out, std::int64_t bytes) {
    flow.Receive(Slot(r), bytes);
    if (size() == 2) flow.AddTo(own, out);  // of two, any order of arrival is the rank order
  }

  void SumSlots(const float* own, std::int64_t count, float* out) {
    std::int64_t done = 0;
    for (int r = 0; r < size(); ++r) {
      parts_[static_cast<std::size_t>(r)] =
          r == rank() ? own : reinterpret_cast<const float*>(Slot(r));
    }
    if (size() == 2) {
      rounds_.ForEachPeer([&](int, Flow& flow) { done = flow.added_bytes() / kFloatBytes; });
      for (const float*& part : parts_) part += done;
    }
    RankOrderSum(parts_, count - done, out + done);
  }

  const FabricCommunicatorOptions options_;
  const std::shared_ptr<Words> words_;
  const std::shared_ptr<SharedWindows> windows_;
  bool met_ = false;                                   // MeetWindows() has been called
  bool shares_ = false;                                // all ranks read the memory of all others
  std::vector<SharedWindows::Handles> their_handles_;  // by rank
  std::vector<SharedWindows::Place> their_places_;     // by rank
  std::vector<std::uint64_t> their_attached_;          // by rank
  std::vector<const std::byte*> sources_;              // by rank
  std::uint64_t word_bytes_ = 0;                       // received by Tell()
  std::uint64_t read_bytes_ = 0;                       // of other ranks' windows
  const std::int64_t slot_bytes_;
  CollectiveRounds rounds_;
  std::vector<const float*> parts_;     // by rank
  std::unique_ptr<std::byte[]> slots_;  // [size, slot_bytes_] what is to be summed
  CollectiveCounters counters_;
  bool gathered_ = false;  // the last round was a gather
};

absl::Status FabricCommunicator::MeetWindows() {
  if (std::exchange(met_, true) || windows_->empty()) return absl::OkStatus();
  words_->handles = windows_->handles();
  RETURN_IF_ERROR(Tell(kMeetWindows, 0, words_->handles, their_handles_));
  words_->attached = 1;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const absl::Status attached = windows_->Attach(r, their_handles_[static_cast<std::size_t>(r)]);
    if (attached.ok()) continue;
    if (words_->attached != 0) {
      spdlog::info("ranks send each other all activations: no shared memory with rank {}: {}", r,
                   std::string_view(attached.message().data(), attached.message().size()));
    }
    words_->attached = 0;
  }
  their_attached_[static_cast<std::size_t>(rank())] = words_->attached;
  RETURN_IF_ERROR(Tell(kMeetWindows, 1, words_->attached, their_attached_));
  shares_ = std::find(their_attached_.begin(), their_attached_.end(), 0) == their_attached_.end();
  return absl::OkStatus();
}

absl::Status FabricCommunicator::ShowInput(Operation operation, std::int64_t operation_bytes,
                                           const void* in, std::int64_t bytes) {
  words_->place = *windows_->Find(in, bytes);
  RETURN_IF_ERROR(Tell(operation, operation_bytes, words_->place, their_places_));
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const SharedWindows::Place& place = their_places_[static_cast<std::size_t>(r)];
    sources_[static_cast<std::size_t>(r)] = windows_->At(r, place, bytes);
    if (sources_[static_cast<std::size_t>(r)] != nullptr) continue;
    rounds_.Fail(absl::InternalError(
        fmt::format("rank {} has {} bytes at {} of window {}, where there are none", r, bytes,
                    place.offset, place.window)));
    return rounds_.CheckStatus();
  }
  return absl::OkStatus();
}

absl::Status FabricCommunicator::AllReduceShared(float* data, std::int64_t count) {
  // As in two, but all is read where it lies.
  const std::int64_t bytes = count * kFloatBytes;
  const Chunks chunks(count, size());
  RETURN_IF_ERROR(ShowInput(kSharedAllReduceScatter, bytes, data, bytes));
  const std::int64_t first = chunks.begin(rank());
  SumSources(data + first, first, chunks.length(rank()), data + first);
  RETURN_IF_ERROR(Barrier(kSharedAllReduceGather, bytes));
  ForEachSource([&](int r, const std::byte* source) {
    Read(data + chunks.begin(r), source + chunks.begin(r) * kFloatBytes,
         chunks.length(r) * kFloatBytes);
  });
  return Barrier(kLeaveShared, bytes);
}

absl::Status FabricCommunicator::AllReduceDirect(float* data, std::int64_t count) {
  const std::int64_t bytes = count * kFloatBytes;
  rounds_.ForEachPeer([&](int r, Flow& flow) {
    flow.Send(data, bytes);
    ReceiveToSum(r, flow, data, data, bytes);
  });
  RETURN_IF_ERROR(SymmetricRound(kAllReduceDirect, bytes));
  SumSlots(data, count, data);
  return absl::OkStatus();
}

absl::Status FabricCommunicator::AllReduceInTwo(float* data, std::int64_t count) {
  // Every rank sums a chunk of its own and hands the sums to the others.
  const Chunks chunks(count, size());
  float* const own = data + chunks.begin(rank());
  rounds_.ForEachPeer([&](int r, Flow& flow) {
    flow.Send(data + chunks.begin(r), chunks.length(r) * kFloatBytes);
    ReceiveToSum(r, flow, own, own, chunks.length(rank()) * kFloatBytes);
  });
  RETURN_IF_ERROR(SymmetricRound(kAllReduceScatter, count * kFloatBytes));
  SumSlots(own, chunks.length(rank()), own);
  rounds_.ForEachPeer([&](int r, Flow& flow) {
    flow.Send(own, chunks.length(rank()) * kFloatBytes);
    flow.Receive(data + chunks.begin(r), chunks.length(r) * kFloatBytes);
  });
  return SymmetricRound(kAllReduceGather, count * kFloatBytes);
}

}  // namespace

std::unique_ptr<Communicator> MakeFabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank,
                                                     absl::Span<const PeerId> peers,
                                                     absl::Span<const std::uint32_t> tags,
                                                     const FabricCommunicatorOptions& options) {
  return std::make_unique<FabricCommunicator>(mux, rank, peers, tags, options);
}

}  // namespace weft
