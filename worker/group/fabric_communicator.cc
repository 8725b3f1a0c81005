#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/ceil_div.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/group/collective_rounds.h"
#include "worker/group/communicator.h"
#include "worker/group/rank_order_sum.h"

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

constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t to) { return CeilDiv(a, to) * to; }

// Chunks and slots start on cache lines.
constexpr std::int64_t kAlign = 64;

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
  FabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank, absl::Span<const PeerId> peers,
                     absl::Span<const std::uint32_t> tags, const FabricCommunicatorOptions& options)
      : options_(options),
        slot_bytes_(MaxFlowBytes(options.max_bytes, static_cast<int>(peers.size()))),
        rounds_(std::move(mux), rank, peers, tags, slot_bytes_, options),
        parts_(peers.size()),
        slots_(std::make_unique_for_overwrite<std::byte[]>(
            static_cast<std::size_t>(slot_bytes_ * size() + kAlign))) {
    CHECK(options.max_bytes > 0);
  }

  int rank() const override { return rounds_.rank(); }
  int size() const override { return rounds_.size(); }

  absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                            kernels::Stream&) override {
    RETURN_IF_ERROR(CheckSum(dtype));
    RETURN_IF_ERROR(CheckBytes("AllReduceSum", count, kFloatBytes));
    return Measured([&] {
      float* const floats = static_cast<float*>(data);
      return count * kFloatBytes <= DirectBytes(size()) ? AllReduceDirect(floats, count)
                                                        : AllReduceInTwo(floats, count);
    });
  }

  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("AllGather", bytes_per_rank, size()));
    return Measured([&] {
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        flow.Send(in, bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      CopyOwn(in, At(out, rank(), bytes_per_rank), bytes_per_rank);
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
    return Measured([&] {
      rounds_.ForEachPeer([&](int r, Flow& flow) {
        flow.Send(At(in, r, bytes_per_rank), bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      CopyOwn(At(in, rank(), bytes_per_rank), At(out, rank(), bytes_per_rank), bytes_per_rank);
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
    counters.received_bytes = rounds_.received_bytes();
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
  const std::int64_t slot_bytes_;
  CollectiveRounds rounds_;
  std::vector<const float*> parts_;     // by rank
  std::unique_ptr<std::byte[]> slots_;  // [size, slot_bytes_] what is to be summed
  CollectiveCounters counters_;
  bool gathered_ = false;  // the last round was a gather
};

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
  const std::int64_t chunk = RoundUp(CeilDiv(count, size()), kAlign / kFloatBytes);
  const auto begin = [&](int r) { return std::min(r * chunk, count); };
  const auto length = [&](int r) { return begin(r + 1) - begin(r); };
  float* const own = data + begin(rank());
  rounds_.ForEachPeer([&](int r, Flow& flow) {
    flow.Send(data + begin(r), length(r) * kFloatBytes);
    ReceiveToSum(r, flow, own, own, length(rank()) * kFloatBytes);
  });
  RETURN_IF_ERROR(SymmetricRound(kAllReduceScatter, count * kFloatBytes));
  SumSlots(own, length(rank()), own);
  rounds_.ForEachPeer([&](int r, Flow& flow) {
    flow.Send(own, length(rank()) * kFloatBytes);
    flow.Receive(data + begin(r), length(r) * kFloatBytes);
  });
  return SymmetricRound(kAllReduceGather, count * kFloatBytes);
}

}  // namespace

std::unique_ptr<Communicator> MakeFabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank,
                                                     absl::Span<const PeerId> peers,
                                                     absl::Span<const std::uint32_t> tags,
                                                     const FabricCommunicatorOptions& options) {
  return std::make_unique<FabricCommunicator>(std::move(mux), rank, peers, tags, options);
}

}  // namespace weft
