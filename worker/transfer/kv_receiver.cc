#include "worker/transfer/kv_receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fmt/format.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_routes.h"

namespace weft {
namespace {

constexpr absl::Duration kReportInterval = absl::Seconds(1);

}  // namespace

void SendKvText(Fabric& fabric, PeerId to, KvMessage message, std::string_view text) {
  auto bytes = std::make_shared<std::vector<std::byte>>(kKvHeaderBytes + text.size());
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  std::copy(data, data + text.size(), bytes->begin() + kKvHeaderBytes);
  message.payload = absl::MakeConstSpan(*bytes).subspan(kKvHeaderBytes);
  EncodeKvHeader(message, bytes->data());
  const absl::Span<const std::byte> span(*bytes);
  // Short enough for any fabric, and a dead peer is found by those who wait for it.
  fabric.Send(to, Channel::kKv, {span}, [bytes](const absl::Status&) {}).IgnoreError();
}

void KvReceiver::Open(const KvOp& op, const SlotTable& slots, std::vector<KvReport>& reports) {
  const ShardLayout& own = rank_.own();
  Transfer& transfer = transfers_[op.transfer];
  transfer.first_position = op.first_position;
  transfer.end_position = op.end_position;
  const std::int64_t num_blocks =
      op.end_position == 0 ? 0 : own.BlockIndex(op.end_position - 1) + 1;
  for (std::int64_t i = 0; i < num_blocks; ++i) transfer.table.push_back(slots.Block(op.slot, i));
  const KvCacheShape& shape = rank_.cache->shape();
  const std::int64_t rows = own.LocalLength(op.end_position) - own.LocalLength(op.first_position);
  transfer.bytes_left = rows * KvRowBytes(shape, shape.num_kv_heads) * shape.num_layers;
  reports.push_back({.transfer = op.transfer, .kind = KvReport::Kind::kOpened});
  if (transfer.bytes_left == 0) {
    reports.push_back({.transfer = op.transfer, .kind = KvReport::Kind::kDone});
  }
}

std::string KvReceiver::CheckHello(const KvMessage& message, Peer& peer,
                                   std::string& address) const {
  v1::KvEndpoint hello;
  if (!hello.ParseFromArray(message.payload.data(), static_cast<int>(message.payload.size())) ||
      hello.fabric_addresses_size() != 1) {
    return "a greeting that is none";
  }
  address = hello.fabric_addresses(0);
  if (hello.format() != rank_.format) {
    return fmt::format("the KV of the prefill group is {}; this group has {}", hello.format(),
                       rank_.format);
  }
  const absl::StatusOr<ShardLayout> layout =
      ShardLayout::Create({.tensor_parallel_size = hello.tensor_parallel_size(),
                           .decode_context_parallel_size = hello.decode_context_parallel_size(),
                           .block_size = hello.block_size(),
                           .interleave = hello.cp_kv_cache_interleave_size()},
                          rank_.heads, message.rank);
  if (!layout.ok()) return std::string(layout.status().message());
  peer.layout = *layout;
  return "";
}

void KvReceiver::OnHello(const KvMessage& message) {
  if (peers_.contains(message.connection)) return;
  Peer peer;
  std::string address;
  const std::string refusal = CheckHello(message, peer, address);
  absl::StatusOr<PeerId> id = TakeConnection(address);
  if (!id.ok()) id = fabric_.Connect(address, static_cast<std::uint32_t>(rank_.rank));
  if (!id.ok()) {
    spdlog::warn("kv: cannot answer a prefill rank: {}", std::string(id.status().message()));
    return;
  }
  peer.id = *id;
  peer.address = address;
  if (!refusal.empty()) spdlog::warn("kv: refused a prefill rank: {}", refusal);
  if (shared_memory_ && message.transfer != 0) {
    peer.memory = PeerMemory::Open(address, static_cast<int>(message.transfer));
  }
  Answer(peer, KvMessageType::kWelcome,
         {.connection = message.connection, .transfer = peer.memory.has_value() ? 1u : 0u},
         refusal);
  peers_.emplace(message.connection, std::move(peer));
}

void KvReceiver::Answer(const Peer& peer, KvMessageType type, const KvMessage& to,
                        std::string_view text) {
  SendKvText(fabric_, peer.id, {.type = type, .connection = to.connection, .transfer = to.transfer},
             text);
}

absl::Status KvReceiver::CheckRows(const KvMessage& message, const Transfer& transfer,
                                   const ShardLayout& from) const {
  const KvCacheShape& shape = rank_.cache->shape();
  const IndexRange held = rank_.own().GroupKvHeads();
  const KvRowRange& range = message.range;
  if (range.layer >= shape.num_layers || range.heads.begin < held.begin ||
      range.heads.end > held.end || range.first_position < transfer.first_position ||
      range.end_position > transfer.end_position) {
    return absl::InvalidArgumentError(fmt::format(
        "rows of layer {}, heads {} to {}, positions {} to {}; wanted are layers below {}, heads "
        "{} to {}, positions {} to {}",
        range.layer, range.heads.begin, range.heads.end, range.first_position, range.end_position,
        shape.num_layers, held.begin, held.end, transfer.first_position, transfer.end_position));
  }
  const std::int64_t bytes =
      CountKvRows(from, rank_.own(), range.first_position, range.end_position) *
      KvRowBytes(shape, range.heads.size());
  const auto seen = static_cast<std::int64_t>(message.payload.size());
  if (seen != bytes || bytes > transfer.bytes_left) {
    return absl::InvalidArgumentError(fmt::format(
        "rows of {} bytes; the range has {} and {} are missing", seen, bytes, transfer.bytes_left));
  }
  if ((checksum_ || message.checksum != 0) && message.checksum != KvChecksum(message.payload)) {
    return absl::DataLossError("rows were damaged on the way: the checksum differs");
  }
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const std::byte>> KvReceiver::FindOffer(const KvMessage& offer,
                                                                  const PeerMemory& memory) {
  KvOffer where{};
  if (offer.payload.size() != sizeof(where)) {
    return absl::InvalidArgumentError(
        fmt::format("an offer of {} bytes; it has {}", offer.payload.size(), sizeof(where)));
  }
  std::memcpy(&where, offer.payload.data(), sizeof(where));
  const std::uint64_t size = memory.bytes().size();
  if (where.bytes < kKvHeaderBytes || where.bytes > size || where.offset > size - where.bytes) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes at {} are offered; a message has {} at least, and there are {}",
                    where.bytes, where.offset, kKvHeaderBytes, size));
  }
  return memory.bytes().subspan(where.offset, where.bytes);
}

absl::Status KvReceiver::StoreOffer(const KvMessage& offer, const Peer& peer, Transfer& transfer) {
  ASSIGN_OR_RETURN(const absl::Span<const std::byte> bytes, FindOffer(offer, *peer.memory));
  std::byte before[kKvHeaderBytes];
  std::memcpy(before, bytes.data(), kKvHeaderBytes);
  FenceSharedMemory();
  const absl::StatusOr<KvMessage> rows = DecodeKvMessage(bytes);
  if (!rows.ok() || rows->type != KvMessageType::kRows || rows->connection != offer.connection ||
      rows->transfer != offer.transfer || rows->range != offer.range) {
    return absl::UnavailableError("what the prefill rank has offered is not there any more");
  }
  RETURN_IF_ERROR(Store(*rows, peer, transfer));
  // The sender wipes the header before it writes anything else there: if it is the same after the
  // rows have been read, they are the ones that were offered.
  FenceSharedMemory();
  if (std::memcmp(before, bytes.data(), kKvHeaderBytes) != 0) {
    return absl::UnavailableError("what the prefill rank has offered went while it was read");
  }
  read_bytes_ += static_cast<std::int64_t>(rows->payload.size());
  return absl::OkStatus();
}

absl::Status KvReceiver::Store(const KvMessage& message, const Peer& peer, Transfer& transfer) {
  RETURN_IF_ERROR(CheckRows(message, transfer, *peer.layout));
  RETURN_IF_ERROR(
      copier_.Scatter({.cache = *rank_.cache, .layout = rank_.own(), .table = transfer.table},
                      *peer.layout, message.range, message.payload));
  const auto bytes = static_cast<std::int64_t>(message.payload.size());
  received_bytes_ += bytes;
  const auto from = static_cast<std::size_t>(peer.layout->rank());
  received_from_.resize(std::max(received_from_.size(), from + 1));
  received_from_[from] += bytes;
  transfer.bytes += bytes;
  transfer.bytes_left -= bytes;
  return absl::OkStatus();
}

void KvReceiver::OnRows(const KvMessage& message, absl::Time now, std::vector<KvReport>& reports) {
  const auto peer = peers_.find(message.connection);
  if (peer == peers_.end() || !peer->second.layout.has_value()) {
    ++dropped_messages_;
    return;
  }
  const auto found = transfers_.find(message.transfer);
  if (found == transfers_.end() || found->second.failed) {
    ++dropped_messages_;
    Answer(peer->second, KvMessageType::kRejected, message, "");
    return;
  }
  Transfer& transfer = found->second;
  const bool offered = message.type == KvMessageType::kOffer && peer->second.memory.has_value();
  const absl::Status stored = offered ? StoreOffer(message, peer->second, transfer)
                                      : Store(message, peer->second, transfer);
  if (!stored.ok()) {
    transfer.failed = true;
    ++failed_;
    reports.push_back({.transfer = message.transfer,
                       .kind = KvReport::Kind::kFailed,
                       .error = std::string(stored.message())});
    Answer(peer->second, KvMessageType::kRejected, message, "");
    return;
  }
  Answer(peer->second, KvMessageType::kTaken, message, "");
  const bool done = transfer.bytes_left == 0;
  if (!done && now - transfer.last_report < kReportInterval) return;
  transfer.last_report = now;
  reports.push_back({.transfer = message.transfer,
                     .kind = done ? KvReport::Kind::kDone : KvReport::Kind::kProgress,
                     .bytes = transfer.bytes});
}

// A rank that greets again has given up what it sent before.
absl::StatusOr<PeerId> KvReceiver::TakeConnection(std::string_view address) {
  const auto known = std::find_if(peers_.begin(), peers_.end(), [&](const auto& entry) {
    return entry.second.address == address && fabric_.PeerStatus(entry.second.id).ok();
  });
  if (known == peers_.end()) return absl::NotFoundError("");
  const PeerId id = known->second.id;
  peers_.erase(known);
  return id;
}

void KvReceiver::DropDeadPeers() {
  absl::erase_if(peers_, [this](const auto& entry) {
    if (fabric_.PeerStatus(entry.second.id).ok()) return false;
    fabric_.Disconnect(entry.second.id);
    return true;
  });
}

void KvReceiver::AddTo(KvCounters& counters) const {
  counters.received_bytes += received_bytes_;
  counters.received_from = received_from_;
  counters.read_bytes += read_bytes_;
  counters.dropped_messages += dropped_messages_;
  counters.failed_rows += failed_;
  counters.receiving += static_cast<std::int32_t>(transfers_.size());
  counters.peers += static_cast<std::int32_t>(peers_.size());
}

}  // namespace weft
