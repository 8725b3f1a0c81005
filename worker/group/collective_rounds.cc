#include "worker/group/collective_rounds.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <string_view>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "server/base/bounded_time.h"
#include "server/base/check.h"
#include "server/base/log.h"
#include "worker/group/rank_order_sum.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<std::string_view, kNumOperations> kOperationNames = {
    "AllReduceSum",
    "AllReduceSum",
    "AllReduceSum",
    "AllGather",
    "ReduceScatterSum",
    "AllToAll",
    "Gather",
    "Gather",
    "AllReduceSum from shared memory",
    "AllReduceSum from shared memory",
    "AllGather from shared memory",
    "ReduceScatterSum from shared memory",
    "AllToAll from shared memory",
    "the end of a call with shared memory",
    "the meeting of shared memory"};

// A rank may leave after its last round while others are still in theirs. When nothing comes from
// those either, they may have given up because of it.
constexpr auto kLongSilence = std::chrono::seconds(1);

// Two rounds, and what wrapping around wastes.
std::size_t RingBytes(std::int64_t max_flow_bytes) {
  const auto pieces = static_cast<std::size_t>(max_flow_bytes / kPieceBytes + 1);
  return (2 * pieces + 2) * MessageRing::BytesOf(kPieceBytes);
}

std::string_view View(absl::string_view text) { return {text.data(), text.size()}; }

}  // namespace

CollectiveRounds::CollectiveRounds(std::shared_ptr<CollectiveMux> mux, int rank,
                                   absl::Span<const PeerId> peers,
                                   absl::Span<const std::uint32_t> tags,
                                   std::int64_t max_flow_bytes,
                                   const FabricCommunicatorOptions& options)
    : mux_(std::move(mux)),
      fabric_(mux_->fabric()),
      id_(options.id),
      stall_timeout_(options.stall_timeout),
      rank_(rank),
      tags_(tags.begin(), tags.end()) {
  CHECK(peers.size() == tags.size());
  CHECK(rank >= 0 && rank < size());
  for (std::size_t r = 0; r < peers.size(); ++r) {
    flows_.push_back(Flow(peers[r], static_cast<int>(r) == rank ? 0 : RingBytes(max_flow_bytes)));
  }
  const auto headers = std::make_shared<CollectiveHeader[]>(
      static_cast<std::size_t>(max_flow_bytes / kPieceBytes + 1));
  headers_ = headers.get();
  mux_->Keep(headers);
  mux_->Add(id_, *this);
}

CollectiveRounds::~CollectiveRounds() { mux_->Remove(id_); }

void CollectiveRounds::Abort() {
  aborted_.store(true, std::memory_order_relaxed);
  fabric_.Wake();
}

const absl::Status& CollectiveRounds::CheckStatus() {
  if (aborted_.load(std::memory_order_relaxed)) {
    Fail(absl::AbortedError("the communicator was aborted"));
  }
  return status_;
}

absl::Status CollectiveRounds::Run(Operation operation, std::int64_t bytes) {
  operation_ = operation;
  operation_bytes_ = static_cast<std::uint64_t>(bytes);
  missing_ = static_cast<int>(
      std::count_if(flows_.begin(), flows_.end(), [](const Flow& f) { return f.receives_; }));
  in_round_ = true;
  all_sent_ = false;
  if (CheckStatus().ok()) {
    SendPieces();
    TakeStaged();
    WaitForEnd();
  }
  in_round_ = false;
  ++round_;
  for (Flow& flow : flows_) flow.sends_ = flow.receives_ = false;
  return status_;
}

// Piece by piece over all ranks, so that all of them get their first one soon; starting behind
// ourselves, so that not all ranks fill rank 0's queue first.
void CollectiveRounds::SendPieces() {
  std::int64_t longest = 0;
  for (const Flow& flow : flows_) {
    if (flow.sends_) longest = std::max(longest, flow.send_bytes_);
  }
  for (std::int64_t piece = 0; piece == 0 || piece * kPieceBytes < longest; ++piece) {
    const std::int64_t offset = piece * kPieceBytes;
    CollectiveHeader& header = headers_[piece];
    header = {.communicator = id_,
              .round = round_,
              .operation = operation_,
              .reserved = 0,
              .operation_bytes = operation_bytes_,
              .offset = static_cast<std::uint64_t>(offset)};
    for (int i = 1; i < size(); ++i) {
      Flow& flow = flows_[static_cast<std::size_t>((rank_ + i) % size())];
      if (!flow.sends_ || (piece > 0 && offset >= flow.send_bytes_)) continue;
      const auto bytes = std::min(kPieceBytes, flow.send_bytes_ - offset);
      ++pending_sends_;
      absl::Status status = mux_->Send(
          flow.peer_, header,
          absl::MakeConstSpan(flow.send_from_ + offset, static_cast<std::size_t>(bytes)));
      if (!status.ok()) Fail(std::move(status));
    }
  }
  all_sent_ = true;
}

void CollectiveRounds::TakeStaged() {
  for (int r = 0; r < size(); ++r) {
    MessageRing& staged = flows_[static_cast<std::size_t>(r)].staged_;
    while (std::optional<MessageRing::Message> message = staged.Front()) {
      if (message->header.round != round_) break;
      Place(r, message->header, message->payload);
      staged.Pop();
    }
  }
}

void CollectiveRounds::WaitForEnd() {
  const auto stall_timeout = ToBoundedChrono(stall_timeout_);
  const absl::Duration nap = std::min(stall_timeout_, absl::Milliseconds(100));
  Clock::time_point last_event = Clock::now();
  bool looked_again = false;
  while (status_.ok() && (missing_ > 0 || pending_sends_ > 0)) {
    if (!CheckStatus().ok()) return;
    const std::uint64_t before = events_;
    fabric_.Wait(nap);
    const Clock::time_point now = Clock::now();
    if (events_ != before) {
      last_event = now;
      looked_again = false;
      continue;
    }
    absl::Status lost = LostPeer(now - last_event >= kLongSilence);
    if (lost.ok() && now - last_event >= stall_timeout) lost = Stalled();
    if (lost.ok()) continue;
    // What the peer sent before it died, or while this process was stopped, may be here already.
    if (looked_again) return Fail(std::move(lost));
    looked_again = true;
    while (fabric_.Progress()) {
    }
  }
}

absl::Status CollectiveRounds::LostPeer(bool any) const {
  for (std::size_t r = 0; r < flows_.size(); ++r) {
    if (static_cast<int>(r) == rank_ || !(any || flows_[r].receives_)) continue;
    absl::Status status = fabric_.PeerStatus(flows_[r].peer_);
    if (!status.ok()) {
      return absl::UnavailableError(
          fmt::format("lost rank {} in {}: {}", r, DescribeCurrent(), View(status.message())));
    }
  }
  return absl::OkStatus();
}

absl::Status CollectiveRounds::Stalled() const {
  std::vector<std::size_t> silent;
  for (std::size_t r = 0; r < flows_.size(); ++r) {
    if (flows_[r].receives_) silent.push_back(r);
  }
  return absl::UnavailableError(
      fmt::format("nothing arrived for {} in {}; missing are ranks [{}], sends pending {}",
                  absl::FormatDuration(stall_timeout_), DescribeCurrent(), fmt::join(silent, ", "),
                  pending_sends_));
}

void CollectiveRounds::OnSent(const absl::Status& status) {
  ++events_;
  --pending_sends_;
  if (!status.ok()) {
    Fail(absl::UnavailableError(
        fmt::format("a send failed in {}: {}", DescribeCurrent(), View(status.message()))));
  }
}

void CollectiveRounds::OnMessage(std::uint32_t from_tag, const CollectiveHeader& header,
                                 absl::Span<const std::byte> payload) {
  if (!status_.ok()) return;
  const auto tag = std::find(tags_.begin(), tags_.end(), from_tag);
  const int from = static_cast<int>(tag - tags_.begin());
  if (from == size() || from == rank_) {
    if (std::has_single_bit(++strange_messages_)) {
      spdlog::warn(
          "collectives: dropped a message for communicator {} with the tag {} of a "
          "stranger; {} so far",
          id_, from_tag, strange_messages_);
    }
    return;
  }
  ++events_;
  const std::uint32_t ahead = header.round - round_;
  if (ahead == 0 && in_round_) return Place(from, header, payload);
  if (ahead <= kMaxRoundsAhead &&
      flows_[static_cast<std::size_t>(from)].staged_.Push(header, payload)) {
    return;
  }
  Fail(absl::InternalError(
      fmt::format("rank {} is in {} while rank {} is {} round {}: they do not make the same calls",
                  from, Describe(header.operation, header.operation_bytes, header.round), rank_,
                  in_round_ ? "in" : "before", round_)));
}

void CollectiveRounds::Place(int from, const CollectiveHeader& header,
                             absl::Span<const std::byte> payload) {
  Flow& flow = flows_[static_cast<std::size_t>(from)];
  const auto bytes = static_cast<std::int64_t>(payload.size());
  if (header.operation != operation_ || header.operation_bytes != operation_bytes_) {
    return Fail(absl::InternalError(
        fmt::format("rank {} is in {} while rank {} is in {}", from,
                    Describe(header.operation, header.operation_bytes, header.round), rank_,
                    DescribeCurrent())));
  }
  const bool empty_as_agreed = bytes == 0 && flow.receive_bytes_ == 0;
  const bool fits = bytes > 0 && bytes <= flow.receive_bytes_ - flow.received_bytes_;
  if (!flow.receives_ || !(fits || empty_as_agreed) ||
      header.offset != static_cast<std::uint64_t>(flow.received_bytes_)) {
    return Fail(absl::InternalError(
        fmt::format("rank {} sent {} bytes at {} in {}, of which rank {} expects {} and has {}",
                    from, bytes, header.offset, DescribeCurrent(), rank_,
                    flow.receives_ ? flow.receive_bytes_ : 0, flow.received_bytes_)));
  }
  if (bytes > 0) Put(from, flow, payload);
  flow.received_bytes_ += bytes;
  received_bytes_ += payload.size();
  if (flow.received_bytes_ < flow.receive_bytes_) return;
  flow.receives_ = false;
  --missing_;
}

void CollectiveRounds::Put(int from, Flow& flow, absl::Span<const std::byte> payload) {
  const std::int64_t at = flow.received_bytes_;
  const auto bytes = static_cast<std::int64_t>(payload.size());
  const bool may_add = flow.add_to_ != nullptr && flow.added_bytes_ == at && all_sent_ &&
                       pending_sends_ == 0 && bytes % std::int64_t{sizeof(float)} == 0;
  if (!may_add) {
    std::memcpy(flow.receive_to_ + at, payload.data(), payload.size());
    return;
  }
  const std::int64_t first = at / std::int64_t{sizeof(float)};
  const float* parts[] = {flow.add_to_ + first, reinterpret_cast<const float*>(payload.data())};
  if (from < rank_) std::swap(parts[0], parts[1]);
  RankOrderSum(parts, bytes / std::int64_t{sizeof(float)}, flow.sum_out_ + first);
  flow.added_bytes_ += bytes;
}

std::string CollectiveRounds::Describe(std::uint32_t operation, std::uint64_t bytes,
                                       std::uint32_t round) const {
  return fmt::format(
      "{} of {} bytes (round {} of communicator {})",
      operation < kNumOperations ? kOperationNames[operation] : "an unknown operation", bytes,
      round, id_);
}

}  // namespace weft
