#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "server/base/check.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "worker/group/collective_mux.h"
#include "worker/group/communicator.h"
#include "worker/group/message_ring.h"
#include "worker/group/rank_order_sum.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

// What a message belongs to. An all-reduce of many bytes is two rounds.
enum Operation : std::uint32_t {
  kAllReduceDirect,
  kAllReduceScatter,
  kAllReduceGather,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kGatherGo,
  kNumOperations,
};
constexpr std::array<std::string_view, kNumOperations> kOperationNames = {
    "AllReduceSum",     "AllReduceSum", "AllReduceSum", "AllGather",
    "ReduceScatterSum", "AllToAll",     "Gather",       "Gather"};

// Up to here everybody sends everything to everybody: one round instead of two. Measured with
// group_bench: with 2 ranks both ways move the same bytes; with more the direct way moves N/2
// times as many.
constexpr std::int64_t kDirectBytesOfTwo = 256 << 10;
constexpr std::int64_t kDirectBytes = 32 << 10;

// How many rounds a peer can rightly be ahead: see Gather().
constexpr std::uint32_t kMaxRoundsAhead = 4;

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t to) { return CeilDiv(a, to) * to; }

// Every operation is one or two rounds. In a round each rank sends at most one buffer to each
// other rank and receives at most one from each; a round ends when all of it is there. As a rank
// cannot finish a round without the others' part, nobody is more than a round ahead (Gather() says
// how it keeps to that); what arrives early waits in the sender's ring.
class FabricCommunicator final : public Communicator, public CollectiveMux::Receiver {
 public:
  FabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank, absl::Span<const PeerId> peers,
                     absl::Span<const std::uint32_t> tags, const FabricCommunicatorOptions& options)
      : mux_(std::move(mux)),
        fabric_(mux_->fabric()),
        options_(options),
        rank_(rank),
        tags_(tags.begin(), tags.end()),
        slot_bytes_(SlotBytes(options.max_bytes, static_cast<int>(peers.size()))),
        parts_(peers.size()) {
    CHECK(peers.size() == tags.size());
    CHECK(rank >= 0 && rank < size());
    CHECK(options.max_bytes > 0);
    const std::size_t ring_bytes = RingBytes(slot_bytes_);
    for (std::size_t r = 0; r < peers.size(); ++r) {
      flows_.push_back(
          {.peer = peers[r],
           .staged = MessageRing(static_cast<int>(r) == rank ? std::size_t{0} : ring_bytes)});
    }
    slots_ = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<std::size_t>(slot_bytes_ * size() + kSlotAlign));
    headers_ = mux_->NewHeaders(static_cast<std::size_t>(CeilDiv(slot_bytes_, kPieceBytes)));
    mux_->Add(options.id, *this);
  }

  ~FabricCommunicator() override { mux_->Remove(options_.id); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(tags_.size()); }

  absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                            kernels::Stream&) override {
    RETURN_IF_ERROR(CheckSum(dtype));
    RETURN_IF_ERROR(CheckBytes("AllReduceSum", count, sizeof(float)));
    return Run([&] { return DoAllReduce(static_cast<float*>(data), count); });
  }

  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("AllGather", bytes_per_rank, size()));
    return Run([&] {
      ForEachPeer([&](int r, Flow& flow) {
        flow.Send(in, bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      CopyOwn(in, At(out, rank_, bytes_per_rank), bytes_per_rank);
      return SymmetricRound(kAllGather, bytes_per_rank);
    });
  }

  absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank, DType dtype,
                                kernels::Stream&) override {
    RETURN_IF_ERROR(CheckSum(dtype));
    RETURN_IF_ERROR(
        CheckBytes("ReduceScatterSum", count_per_rank, size() * std::int64_t{sizeof(float)}));
    return Run([&]() -> absl::Status {
      const std::int64_t bytes = count_per_rank * std::int64_t{sizeof(float)};
      ForEachPeer([&](int r, Flow& flow) {
        flow.Send(At(in, r, bytes), bytes);
        flow.Receive(Slot(r), bytes);
      });
      RETURN_IF_ERROR(SymmetricRound(kReduceScatter, bytes));
      SumSlots(reinterpret_cast<const float*>(At(in, rank_, bytes)), count_per_rank,
               static_cast<float*>(out));
      return absl::OkStatus();
    });
  }

  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                        kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("AllToAll", bytes_per_rank, size()));
    return Run([&] {
      ForEachPeer([&](int r, Flow& flow) {
        flow.Send(At(in, r, bytes_per_rank), bytes_per_rank);
        flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      CopyOwn(At(in, rank_, bytes_per_rank), At(out, rank_, bytes_per_rank), bytes_per_rank);
      return SymmetricRound(kAllToAll, bytes_per_rank);
    });
  }

  absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                      kernels::Stream&) override {
    RETURN_IF_ERROR(CheckBytes("Gather", bytes_per_rank, size()));
    return Run([&]() -> absl::Status {
      // Only rank 0 waits in a gather. So that the others cannot run away from it with a second
      // one, that one starts with a word from rank 0.
      if (gathered_) {
        ForEachPeer([&](int r, Flow& flow) {
          if (rank_ == 0) flow.Send(nullptr, 0);
          if (r == 0) flow.Receive(nullptr, 0);
        });
        RETURN_IF_ERROR(Round(kGatherGo, bytes_per_rank));
      }
      gathered_ = true;
      ForEachPeer([&](int r, Flow& flow) {
        if (r == 0) flow.Send(in, bytes_per_rank);
        if (rank_ == 0) flow.Receive(At(out, r, bytes_per_rank), bytes_per_rank);
      });
      if (rank_ == 0) CopyOwn(in, out, bytes_per_rank);
      return Round(kGather, bytes_per_rank);
    });
  }

  CollectiveCounters Counters() const override { return counters_; }

  void Abort() override {
    aborted_.store(true, std::memory_order_relaxed);
    fabric_.Wake();
  }

  void OnMessage(std::uint32_t from_tag, const CollectiveHeader& header,
                 absl::Span<const std::byte> payload) override;
  void OnSent(const absl::Status& status) override;

 private:
  static constexpr std::int64_t kSlotAlign = 64;

  // What goes to and comes from one rank.
  struct Flow {
    void Send(const void* from, std::int64_t bytes) {
      sends = true;
      send_from = static_cast<const std::byte*>(from);
      send_bytes = bytes;
    }
    void Receive(void* to, std::int64_t bytes) {
      receives = true;
      receive_to = static_cast<std::byte*>(to);
      receive_bytes = bytes;
      received_bytes = 0;
    }

    PeerId peer;
    MessageRing staged;
    // Of the current round. `receives` ends when all is there.
    bool sends = false;
    bool receives = false;
    const std::byte* send_from = nullptr;
    std::byte* receive_to = nullptr;
    std::int64_t send_bytes = 0;
    std::int64_t receive_bytes = 0;
    std::int64_t received_bytes = 0;
  };

  // The most that one rank sends another in a round.
  static std::int64_t SlotBytes(std::int64_t max_bytes, int size) {
    const std::int64_t direct = std::min(DirectBytes(size), max_bytes);
    // An all-reduce rounds its chunks up to kSlotAlign.
    return RoundUp(std::max(direct, CeilDiv(max_bytes, size)), kSlotAlign) + kSlotAlign;
  }
  static std::int64_t DirectBytes(int size) { return size == 2 ? kDirectBytesOfTwo : kDirectBytes; }
  // Two rounds, since a gather and what follows it may both be early, and the waste of wrapping.
  static std::size_t RingBytes(std::int64_t slot_bytes) {
    const auto pieces = static_cast<std::size_t>(CeilDiv(slot_bytes, kPieceBytes) + 1);
    return 2 * pieces * MessageRing::BytesOf(kPieceBytes) + 2 * MessageRing::BytesOf(kPieceBytes);
  }

  static std::byte* At(void* base, int r, std::int64_t bytes) {
    return static_cast<std::byte*>(base) + r * bytes;
  }
  static const std::byte* At(const void* base, int r, std::int64_t bytes) {
    return static_cast<const std::byte*>(base) + r * bytes;
  }
  static void CopyOwn(const void* in, void* out, std::int64_t bytes) {
    if (in != out && bytes > 0) std::memcpy(out, in, static_cast<std::size_t>(bytes));
  }
  std::byte* Slot(int r) {
    const auto base = reinterpret_cast<std::uintptr_t>(slots_.get());
    const std::uintptr_t pad = (kSlotAlign - base % kSlotAlign) % kSlotAlign;
    return slots_.get() + pad + r * slot_bytes_;
  }

  template <typename Body>
  void ForEachPeer(Body body) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) body(r, flows_[static_cast<std::size_t>(r)]);
    }
  }

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
  absl::Status Run(Body body) {
    const Clock::time_point start = Clock::now();
    CheckAborted();
    absl::Status status = status_;
    if (status.ok()) status = body();
    counters_.waiting += absl::FromChrono(Clock::now() - start);
    if (!status.ok()) return status;
    ++counters_.operations;
    if (options_.progress != nullptr) options_.progress->fetch_add(1, std::memory_order_relaxed);
    return status;
  }

  absl::Status DoAllReduce(float* data, std::int64_t count);
  void SumSlots(const float* own, std::int64_t count, float* out);

  absl::Status SymmetricRound(Operation operation, std::int64_t bytes) {
    gathered_ = false;
    return Round(operation, bytes);
  }
  absl::Status Round(Operation operation, std::int64_t bytes);
  absl::Status SendPieces();
  void TakeStaged();
  absl::Status WaitForRound();
  absl::Status LostPeer() const;
  absl::Status Stalled() const;
  void Place(int from, const CollectiveHeader& header, absl::Span<const std::byte> payload);
  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  bool CheckAborted() {
    if (!aborted_.load(std::memory_order_relaxed)) return false;
    Fail(absl::AbortedError("the communicator was aborted"));
    return true;
  }
  std::string Describe(std::uint32_t operation, std::uint64_t bytes, std::uint32_t round) const;

  const std::shared_ptr<CollectiveMux> mux_;
  Fabric& fabric_;
  const FabricCommunicatorOptions options_;
  const int rank_;
  const std::vector<std::uint32_t> tags_;
  const std::int64_t slot_bytes_;
  std::vector<Flow> flows_;              // by rank
  std::vector<const float*> parts_;      // by rank
  std::unique_ptr<std::byte[]> slots_;   // [size, slot_bytes_] what is to be summed
  CollectiveHeader* headers_ = nullptr;  // of the pieces of the current round

  absl::Status status_;      // the first error; final
  std::uint32_t round_ = 0;  // the current one, or the next one
  bool in_round_ = false;
  Operation operation_{};
  std::uint64_t operation_bytes_ = 0;
  int missing_ = 0;        // ranks whose part has not arrived
  int pending_sends_ = 0;  // pieces the fabric may still read
  std::uint64_t events_ = 0;
  std::uint64_t strange_messages_ = 0;
  bool gathered_ = false;  // the last round was a gather

  CollectiveCounters counters_;
  std::atomic<bool> aborted_{false};
};

absl::Status FabricCommunicator::DoAllReduce(float* data, std::int64_t count) {
  const std::int64_t bytes = count * std::int64_t{sizeof(float)};
  if (bytes <= DirectBytes(size())) {
    ForEachPeer([&](int r, Flow& flow) {
      flow.Send(data, bytes);
      flow.Receive(Slot(r), bytes);
    });
    RETURN_IF_ERROR(SymmetricRound(kAllReduceDirect, bytes));
    SumSlots(data, count, data);
    return absl::OkStatus();
  }
  // Every rank sums its own chunk and hands it to the others.
  constexpr std::int64_t kChunkAlign = kSlotAlign / std::int64_t{sizeof(float)};
  const std::int64_t chunk = RoundUp(CeilDiv(count, size()), kChunkAlign);
  const auto begin = [&](int r) { return std::min(r * chunk, count); };
  const auto chunk_bytes = [&](int r) {
    return (begin(r + 1) - begin(r)) * std::int64_t{sizeof(float)};
  };
  ForEachPeer([&](int r, Flow& flow) {
    flow.Send(data + begin(r), chunk_bytes(r));
    flow.Receive(Slot(r), chunk_bytes(rank_));
  });
  RETURN_IF_ERROR(SymmetricRound(kAllReduceScatter, bytes));
  float* const own = data + begin(rank_);
  SumSlots(own, begin(rank_ + 1) - begin(rank_), own);
  ForEachPeer([&](int r, Flow& flow) {
    flow.Send(own, chunk_bytes(rank_));
    flow.Receive(data + begin(r), chunk_bytes(r));
  });
  return SymmetricRound(kAllReduceGather, bytes);
}

void FabricCommunicator::SumSlots(const float* own, std::int64_t count, float* out) {
  for (int r = 0; r < size(); ++r) {
    parts_[static_cast<std::size_t>(r)] =
        r == rank_ ? own : reinterpret_cast<const float*>(Slot(r));
  }
  RankOrderSum(parts_, count, out);
}

absl::Status FabricCommunicator::Round(Operation operation, std::int64_t bytes) {
  operation_ = operation;
  operation_bytes_ = static_cast<std::uint64_t>(bytes);
  missing_ = static_cast<int>(
      std::count_if(flows_.begin(), flows_.end(), [](const Flow& f) { return f.receives; }));
  in_round_ = true;
  absl::Status status = SendPieces();
  if (status.ok()) {
    TakeStaged();
    status = WaitForRound();
  }
  in_round_ = false;
  ++round_;
  for (Flow& flow : flows_) flow.sends = flow.receives = false;
  return status;
}

// Piece by piece over all ranks, so that all of them get their first one soon; starting behind
// ourselves, so that not all ranks fill rank 0's queue first.
absl::Status FabricCommunicator::SendPieces() {
  std::int64_t longest = 0;
  for (const Flow& flow : flows_) {
    if (flow.sends) longest = std::max(longest, flow.send_bytes);
  }
  for (std::int64_t piece = 0; piece == 0 || piece * kPieceBytes < longest; ++piece) {
    const std::int64_t offset = piece * kPieceBytes;
    CollectiveHeader& header = headers_[piece];
    header = {.communicator = options_.id,
              .round = round_,
              .operation = operation_,
              .reserved = 0,
              .operation_bytes = operation_bytes_,
              .offset = static_cast<std::uint64_t>(offset)};
    for (int i = 1; i < size(); ++i) {
      Flow& flow = flows_[static_cast<std::size_t>((rank_ + i) % size())];
      if (!flow.sends || (piece > 0 && offset >= flow.send_bytes)) continue;
      ++pending_sends_;
      absl::Status status = mux_->Send(
          flow.peer, header,
          absl::MakeConstSpan(
              flow.send_from + offset,
              static_cast<std::size_t>(std::min(kPieceBytes, flow.send_bytes - offset))));
      if (!status.ok()) Fail(std::move(status));
    }
  }
  return status_;
}

void FabricCommunicator::TakeStaged() {
  for (int r = 0; r < size(); ++r) {
    MessageRing& staged = flows_[static_cast<std::size_t>(r)].staged;
    while (std::optional<MessageRing::Message> message = staged.Front()) {
      if (message->header.round != round_) break;
      Place(r, message->header, message->payload);
      staged.Pop();
    }
  }
}

absl::Status FabricCommunicator::WaitForRound() {
  const auto stall_timeout = absl::ToChronoNanoseconds(options_.stall_timeout);
  const absl::Duration nap = std::min(options_.stall_timeout, absl::Milliseconds(100));
  Clock::time_point last_event = Clock::now();
  bool looked_again = false;
  while (status_.ok() && (missing_ > 0 || pending_sends_ > 0)) {
    if (CheckAborted()) break;
    const std::uint64_t before = events_;
    fabric_.Wait(nap);
    const Clock::time_point now = Clock::now();
    if (events_ != before) {
      last_event = now;
      looked_again = false;
      continue;
    }
    absl::Status lost = LostPeer();
    if (lost.ok() && now - last_event >= stall_timeout) lost = Stalled();
    if (lost.ok()) continue;
    // What the peer sent before it died, or while this process was stopped, may be here already.
    if (looked_again) {
      Fail(std::move(lost));
      break;
    }
    looked_again = true;
    while (fabric_.Progress()) {
    }
  }
  return status_;
}

absl::Status FabricCommunicator::LostPeer() const {
  for (std::size_t r = 0; r < flows_.size(); ++r) {
    if (!flows_[r].receives) continue;
    absl::Status status = fabric_.PeerStatus(flows_[r].peer);
    if (!status.ok()) {
      return absl::UnavailableError(
          fmt::format("lost rank {} in {}: {}", r, Describe(operation_, operation_bytes_, round_),
                      std::string_view(status.message().data(), status.message().size())));
    }
  }
  return absl::OkStatus();
}

absl::Status FabricCommunicator::Stalled() const {
  std::vector<std::size_t> silent;
  for (std::size_t r = 0; r < flows_.size(); ++r) {
    if (flows_[r].receives) silent.push_back(r);
  }
  return absl::UnavailableError(fmt::format(
      "nothing arrived for {} in {}; missing are ranks [{}], sends pending {}",
      absl::FormatDuration(options_.stall_timeout), Describe(operation_, operation_bytes_, round_),
      fmt::join(silent, ", "), pending_sends_));
}

void FabricCommunicator::OnSent(const absl::Status& status) {
  ++events_;
  --pending_sends_;
  if (!status.ok()) {
    Fail(absl::UnavailableError(
        fmt::format("a send failed in {}: {}", Describe(operation_, operation_bytes_, round_),
                    std::string_view(status.message().data(), status.message().size()))));
  }
}

void FabricCommunicator::OnMessage(std::uint32_t from_tag, const CollectiveHeader& header,
                                   absl::Span<const std::byte> payload) {
  if (!status_.ok()) return;
  const auto tag = std::find(tags_.begin(), tags_.end(), from_tag);
  const int from = static_cast<int>(tag - tags_.begin());
  if (from == size() || from == rank_) {
    if (std::has_single_bit(++strange_messages_)) {
      spdlog::warn(
          "collectives: dropped a message for communicator {} from a stranger, tag {}; {} so far",
          options_.id, from_tag, strange_messages_);
    }
    return;
  }
  ++events_;
  const std::uint32_t ahead = header.round - round_;
  if (ahead == 0 && in_round_) return Place(from, header, payload);
  if (ahead <= kMaxRoundsAhead &&
      flows_[static_cast<std::size_t>(from)].staged.Push(header, payload)) {
    return;
  }
  Fail(absl::InternalError(fmt::format(
      "rank {} is in {} while rank {} is at round {}: they do not make the same calls", from,
      Describe(header.operation, header.operation_bytes, header.round), rank_, round_)));
}

void FabricCommunicator::Place(int from, const CollectiveHeader& header,
                               absl::Span<const std::byte> payload) {
  Flow& flow = flows_[static_cast<std::size_t>(from)];
  const auto bytes = static_cast<std::int64_t>(payload.size());
  if (header.operation != operation_ || header.operation_bytes != operation_bytes_) {
    Fail(absl::InternalError(
        fmt::format("rank {} is in {} while rank {} is in {}", from,
                    Describe(header.operation, header.operation_bytes, header.round), rank_,
                    Describe(operation_, operation_bytes_, round_))));
    return;
  }
  if (!flow.receives || header.offset != static_cast<std::uint64_t>(flow.received_bytes) ||
      bytes > flow.receive_bytes - flow.received_bytes || (bytes == 0 && flow.receive_bytes != 0)) {
    Fail(absl::InternalError(
        fmt::format("rank {} sent {} bytes at {} in {}, of which rank {} expects {} and has {}",
                    from, bytes, header.offset, Describe(operation_, operation_bytes_, round_),
                    rank_, flow.receives ? flow.receive_bytes : 0, flow.received_bytes)));
    return;
  }
  if (bytes > 0) std::memcpy(flow.receive_to + flow.received_bytes, payload.data(), payload.size());
  flow.received_bytes += bytes;
  counters_.received_bytes += payload.size();
  if (flow.received_bytes < flow.receive_bytes) return;
  flow.receives = false;
  --missing_;
}

std::string FabricCommunicator::Describe(std::uint32_t operation, std::uint64_t bytes,
                                         std::uint32_t round) const {
  return fmt::format(
      "{} of {} bytes (round {} of communicator {})",
      operation < kNumOperations ? kOperationNames[operation] : "an unknown operation", bytes,
      round, options_.id);
}

}  // namespace

std::unique_ptr<Communicator> MakeFabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank,
                                                     absl::Span<const PeerId> peers,
                                                     absl::Span<const std::uint32_t> tags,
                                                     const FabricCommunicatorOptions& options) {
  return std::make_unique<FabricCommunicator>(std::move(mux), rank, peers, tags, options);
}

}  // namespace weft
