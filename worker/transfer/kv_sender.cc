#include "worker/transfer/kv_sender.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/draw.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_receiver.h"

namespace weft {
namespace {

constexpr absl::Duration kReportInterval = absl::Seconds(1);
constexpr absl::Duration kPeerCheck = absl::Milliseconds(500);
// An answer to a greeting that is lost: the peer is gone.
constexpr absl::Duration kWelcomeTimeout = absl::Seconds(10);

// Of a message with its header.
std::int64_t SlotBytes(std::int64_t buffer_bytes) {
  return buffer_bytes + static_cast<std::int64_t>(kKvHeaderBytes);
}

// As many whole slots as fit, two at least.
SharedMemory MakeStaging(std::int64_t slot_bytes, std::int64_t bytes, const Fabric& fabric) {
  const std::int64_t num_slots = std::max<std::int64_t>(2, bytes / slot_bytes);
  absl::StatusOr<SharedMemory> staging =
      SharedMemory::Create(num_slots * slot_bytes, fabric.LocalAddress());
  CHECK_MSG(staging.ok(), std::string(staging.status().message()));
  return *std::move(staging);
}

// `busy` leaves out what was spent waiting for the prompt.
void LogDone(std::uint64_t transfer, std::int64_t bytes, std::int64_t overlapped,
             absl::Duration busy) {
  if (bytes == 0) return;
  spdlog::info(
      "kv transfer {:016x}: sent {:.3f} MB in {:.1f} ms, {:.3f} GB/s; {:.0f} % while the prompt "
      "was computed",
      transfer, static_cast<double>(bytes) / 1e6, absl::ToDoubleMilliseconds(busy),
      static_cast<double>(bytes) / 1e9 / std::max(1e-9, absl::ToDoubleSeconds(busy)),
      100.0 * static_cast<double>(overlapped) / static_cast<double>(bytes));
}

}  // namespace

std::int64_t KvMessageBytes(const KvRank& rank, const KvMoverOptions& options) {
  const KvCacheShape& shape = rank.cache->shape();
  const std::int64_t tile = kKvTile * KvRowBytes(shape, shape.num_kv_heads);
  return (std::max(options.message_bytes, tile) + 63) / 64 * 64;
}

struct KvSender::Peer {
  enum class State : std::uint8_t { kWaiting, kGreeted, kWelcome, kLost };
  State state = State::kWaiting;
  bool connected() const { return state == State::kGreeted || state == State::kWelcome; }
  std::optional<PeerId> id;  // also of one that refuses us, as long as it is alive
  std::uint64_t connection = 0;
  bool reads = false;   // our staging: it gets offers
  absl::Time since;     // it was greeted
  absl::Time retry_at;  // while waiting or lost
  absl::Duration backoff;
  absl::Status status;  // why it was lost
  std::int64_t in_flight = 0;
  struct Message {
    std::uint64_t transfer;
    std::int64_t bytes;
    int buffer;  // that the peer reads; -1: none
  };
  std::deque<Message> untaken;  // in the order they were sent
};

KvSender::KvSender(Fabric& fabric, const KvRank& rank, KvCopier& copier,
                   const KvMoverOptions& options)
    : fabric_(fabric),
      rank_(rank),
      copier_(copier),
      options_(options),
      buffer_bytes_(KvMessageBytes(rank, options)),
      staging_(MakeStaging(SlotBytes(buffer_bytes_), options.staging_bytes, fabric)) {
  const auto count = static_cast<int>(static_cast<std::int64_t>(staging_.bytes().size()) /
                                      SlotBytes(buffer_bytes_));
  for (int i = 0; i < count; ++i) free_buffers_.push_back(i);
}

KvSender::~KvSender() = default;

absl::Status KvSender::ParseTarget(const KvOp& op, Transfer& transfer) const {
  v1::KvTarget target;
  if (op.target == nullptr || !target.ParseFromString(*op.target)) {
    return absl::InvalidArgumentError("the target of a transfer does not parse");
  }
  const v1::KvEndpoint& to = target.endpoint();
  if (to.format() != rank_.format) {
    return absl::FailedPreconditionError(fmt::format(
        "the KV of the decode group is {}; this group has {}", to.format(), rank_.format));
  }
  if (to.tensor_parallel_size() != to.fabric_addresses_size()) {
    return absl::InvalidArgumentError(fmt::format(
        "{} addresses for {} ranks", to.fabric_addresses_size(), to.tensor_parallel_size()));
  }
  ASSIGN_OR_RETURN(transfer.to, LayoutsOfGroup({.tensor_parallel_size = to.tensor_parallel_size(),
                                                .decode_context_parallel_size =
                                                    to.decode_context_parallel_size(),
                                                .block_size = to.block_size(),
                                                .interleave = to.cp_kv_cache_interleave_size()},
                                               rank_.heads));
  for (const KvRoute& route : PlanKvRoutes(rank_.group, transfer.to)) {
    if (route.from_rank != rank_.rank) continue;
    transfer.routes.push_back({.route = route, .address = to.fabric_addresses(route.to_rank)});
  }
  return absl::OkStatus();
}

void KvSender::Open(const KvOp& op) {
  auto transfer = std::make_unique<Transfer>();
  transfer->id = op.transfer;
  transfer->taken_end = op.first_position;
  transfer->status = ParseTarget(op, *transfer);
  transfers_[op.transfer] = std::move(transfer);
}

void KvSender::AddRows(const KvOp& op, const SlotTable& slots) {
  const auto found = transfers_.find(op.transfer);
  if (found == transfers_.end()) return;
  Transfer& transfer = *found->second;
  transfer.last_known = op.last;
  const std::int64_t block = rank_.own().block_size();
  // Whole blocks, but at the end.
  const std::int64_t end =
      options_.layerwise || op.last ? op.end_position : op.end_position / block * block;
  const auto num_blocks = static_cast<std::size_t>((op.end_position + block - 1) / block);
  while (transfer.table.size() < num_blocks) {
    transfer.table.push_back(
        slots.Block(op.slot, static_cast<std::int64_t>(transfer.table.size())));
  }
  transfer.in_step = true;
  if (end <= transfer.taken_end) return;
  transfer.rows.push_back({.first_position = transfer.taken_end, .end_position = end});
  transfer.taken_end = end;
}

void KvSender::Close(std::uint64_t transfer) {
  transfers_.erase(transfer);
  // What a peer that sleeps has not read yet it need not read any more.
  for (const auto& [address, peer] : peers_) {
    for (Peer::Message& message : peer->untaken) {
      if (message.transfer == transfer && message.buffer >= 0) {
        released_.push_back(message.buffer);
        Wipe(std::exchange(message.buffer, -1));
      }
    }
  }
}

bool KvSender::OnLayerStored(std::int32_t layer) {
  bool any = false;
  if (!options_.layerwise) return any;
  for (const auto& [id, transfer] : transfers_) {
    if (!transfer->in_step || transfer->rows.empty()) continue;
    std::int32_t& ready = transfer->rows.back().layers_ready;
    ready = std::max(ready, layer + 1);  // of an earlier step, if this one brought no whole block
    any = true;
  }
  return any;
}

bool KvSender::OnStepEnd() {
  bool any = false;
  for (const auto& [id, transfer] : transfers_) {
    if (!transfer->in_step) continue;
    any = true;
    transfer->in_step = false;
    transfer->computed = transfer->last_known;
    if (!transfer->rows.empty()) {
      transfer->rows.back().layers_ready = rank_.cache->shape().num_layers;
    }
  }
  return any;
}

KvSender::Peer& KvSender::Connect(const std::string& address, absl::Time now) {
  std::unique_ptr<Peer>& peer = peers_[address];
  if (peer == nullptr) {
    peer = std::make_unique<Peer>();
    peer->retry_at = now;
    peer->backoff = options_.min_backoff;
  }
  if (peer->state == Peer::State::kLost && now >= peer->retry_at) {
    peer->state = Peer::State::kWaiting;
  }
  if (peer->state != Peer::State::kWaiting || now < peer->retry_at) return *peer;
  if (!peer->id.has_value()) {
    const absl::StatusOr<PeerId> id =
        fabric_.Connect(address, static_cast<std::uint32_t>(rank_.rank));
    if (!id.ok()) {
      Lose(*peer, id.status());
      peer->retry_at = now + peer->backoff;
      return *peer;
    }
    peer->id = *id;
  }
  peer->connection = DrawUint64();
  peer->state = Peer::State::kGreeted;
  peer->since = now;
  v1::KvEndpoint hello;
  hello.set_format(rank_.format);
  hello.set_tensor_parallel_size(rank_.layout.tensor_parallel_size);
  hello.set_decode_context_parallel_size(rank_.layout.decode_context_parallel_size);
  hello.set_block_size(rank_.own().block_size());
  hello.set_cp_kv_cache_interleave_size(rank_.own().interleave());
  hello.add_fabric_addresses(fabric_.LocalAddress());
  SendKvText(
      fabric_, *peer->id,
      {.type = KvMessageType::kHello,
       .connection = peer->connection,
       .rank = rank_.rank,
       .transfer = options_.shared_memory ? static_cast<std::uint64_t>(staging_.descriptor()) : 0},
      hello.SerializeAsString());
  return *peer;
}

void KvSender::Lose(Peer& peer, const absl::Status& why) {
  peer.state = Peer::State::kLost;
  peer.status = why;
  peer.in_flight = 0;
  peer.backoff = std::min(peer.backoff * 2, options_.max_backoff);
  for (const Peer::Message& message : peer.untaken) {
    if (message.buffer >= 0) Release(message.buffer);
    const auto found = transfers_.find(message.transfer);
    if (found != transfers_.end()) found->second->status.Update(why);
  }
  peer.untaken.clear();
}

void KvSender::CheckPeers(absl::Time now) {
  for (const auto& [address, peer] : peers_) {
    if (!peer->id.has_value()) continue;
    absl::Status status = fabric_.PeerStatus(*peer->id);
    if (!status.ok()) {
      fabric_.Disconnect(*peer->id);
      peer->id.reset();
    } else if (peer->state == Peer::State::kGreeted && now - peer->since > kWelcomeTimeout) {
      status = absl::UnavailableError("a decode rank does not answer");
    }
    if (status.ok() || !peer->connected()) continue;
    Lose(*peer, status);
    peer->retry_at = now + peer->backoff;
  }
  // Who is started again has another address.
  absl::erase_if(peers_, [&](const auto& entry) {
    const Peer& peer = *entry.second;
    return peer.state == Peer::State::kLost && !peer.id.has_value() &&
           now >= peer.retry_at + options_.max_backoff;
  });
}

void KvSender::OnAnswer(const KvMessage& message, absl::Time now) {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&message](const auto& entry) {
    return entry.second->connection == message.connection;
  });
  if (found == peers_.end()) return;
  Peer& peer = *found->second;
  if (message.type == KvMessageType::kWelcome && peer.state == Peer::State::kGreeted) {
    if (message.payload.empty()) {
      peer.state = Peer::State::kWelcome;
      peer.reads = options_.shared_memory && message.transfer == 1;
      peer.backoff = options_.min_backoff;
      return;
    }
    Lose(peer, absl::FailedPreconditionError(std::string(
                   reinterpret_cast<const char*>(message.payload.data()), message.payload.size())));
    peer.retry_at = peer.since + options_.max_backoff;
    return;
  }
  if (peer.state != Peer::State::kWelcome || peer.untaken.empty()) return;
  const Peer::Message oldest = peer.untaken.front();
  peer.untaken.pop_front();
  peer.in_flight -= oldest.bytes;
  if (oldest.buffer >= 0) Release(oldest.buffer);
  const auto transfer = transfers_.find(oldest.transfer);
  if (transfer == transfers_.end()) return;
  transfer->second->in_flight -= oldest.bytes;
  transfer->second->taken_bytes += oldest.bytes;
  if (transfer->second->in_flight == 0)
    transfer->second->busy += now - transfer->second->busy_since;
  if (message.type == KvMessageType::kRejected) {
    transfer->second->status.Update(
        absl::AbortedError("the decode group has given the transfer up"));
  }
}

bool KvSender::Advance(const Transfer& transfer, Route& route) const {
  const std::int32_t num_layers = rank_.cache->shape().num_layers;
  while (route.range < transfer.rows.size()) {
    const Rows& rows = transfer.rows[route.range];
    if (route.layer == num_layers) {
      ++route.range;
      route.layer = 0;
      route.position = -1;
      continue;
    }
    if (route.layer >= rows.layers_ready) return false;
    if (route.position < 0) route.position = rows.first_position;
    if (route.position < rows.end_position) return true;
    ++route.layer;
    route.position = -1;
  }
  return false;
}

bool KvSender::SendNext(Transfer& transfer, Route& route, absl::Time now) {
  while (Advance(transfer, route)) {
    Peer& peer = Connect(route.address, now);
    if (peer.state == Peer::State::kLost) {
      transfer.status.Update(peer.status);
      return false;
    }
    if (peer.state != Peer::State::kWelcome || peer.in_flight >= options_.window_bytes ||
        free_buffers_.empty() || (options_.bandwidth_limit > 0 && now < next_send_)) {
      return false;
    }
    const int buffer = free_buffers_.back();
    std::byte* const payload = BufferAt(buffer) + kKvHeaderBytes;
    KvRowRange range = {.layer = route.layer,
                        .heads = route.route.heads,
                        .first_position = route.position,
                        .end_position = transfer.rows[route.range].end_position};
    const absl::StatusOr<std::int64_t> bytes =
        copier_.Pack({.cache = *rank_.cache, .layout = rank_.own(), .table = transfer.table},
                     transfer.to[route.route.to_rank], range,
                     {payload, static_cast<std::size_t>(buffer_bytes_)});
    if (!bytes.ok()) {
      transfer.status.Update(bytes.status());
      return false;
    }
    route.position = range.end_position;
    if (*bytes == 0) continue;  // the peer owns none of them
    free_buffers_.pop_back();
    if (options_.bandwidth_limit > 0) {
      next_send_ = std::max(now, next_send_) +
                   absl::Seconds(static_cast<double>(*bytes) / options_.bandwidth_limit);
    }
    SendRows(peer, transfer, route, range, buffer, *bytes, now);
    return true;
  }
  return false;
}

void KvSender::SendRows(Peer& peer, Transfer& transfer, const Route& route, const KvRowRange& range,
                        int buffer, std::int64_t bytes, absl::Time now) {
  std::byte* const start = BufferAt(buffer);
  KvMessage message = {.type = KvMessageType::kRows,
                       .connection = peer.connection,
                       .transfer = transfer.id,
                       .range = range};
  message.payload = absl::MakeConstSpan(start + kKvHeaderBytes, static_cast<std::size_t>(bytes));
  if (options_.checksum) message.checksum = KvChecksum(message.payload);
  EncodeKvHeader(message, start);
  peer.untaken.push_back({transfer.id, bytes, peer.reads ? buffer : -1});
  peer.in_flight += bytes;
  if (transfer.in_flight == 0) transfer.busy_since = now;
  transfer.in_flight += bytes;
  sent_bytes_ += bytes;
  sent_to_.resize(std::max(sent_to_.size(), transfer.to.size()));
  sent_to_[route.route.to_rank] += bytes;
  if (!transfer.computed) {
    overlapped_bytes_ += bytes;
    transfer.overlapped_bytes += bytes;
  }
  if (peer.reads) {
    const KvOffer offer = {.offset = static_cast<std::uint64_t>(start - staging_.bytes().data()),
                           .bytes = kKvHeaderBytes + static_cast<std::uint64_t>(bytes)};
    message.type = KvMessageType::kOffer;
    SendKvText(fabric_, *peer.id, message, {reinterpret_cast<const char*>(&offer), sizeof(offer)});
    return;
  }
  const absl::Span<const std::byte> span(start, kKvHeaderBytes + static_cast<std::size_t>(bytes));
  const absl::Status sent =
      fabric_.Send(*peer.id, Channel::kKv, {span},
                   [this, buffer](const absl::Status&) { free_buffers_.push_back(buffer); });
  CHECK_MSG(sent.ok(), std::string(sent.message()));
}

std::byte* KvSender::BufferAt(int buffer) const {
  return staging_.bytes().data() + buffer * SlotBytes(buffer_bytes_);
}

// Whoever still reads in it sees by the header that it is not what was offered.
void KvSender::Wipe(int buffer) {
  std::memset(BufferAt(buffer), 0, kKvHeaderBytes);
  FenceSharedMemory();  // before rows are packed there
}

void KvSender::Release(int buffer) {
  Wipe(buffer);
  free_buffers_.push_back(buffer);
}

bool KvSender::AllSent(const Transfer& transfer) const {
  return transfer.computed && transfer.in_flight == 0 &&
         std::all_of(transfer.routes.begin(), transfer.routes.end(),
                     [&](const Route& route) { return route.range == transfer.rows.size(); });
}

bool KvSender::Report(Transfer& transfer, absl::Time now, std::vector<KvReport>& reports) {
  if (transfer.finished) return false;
  KvReport report = {.transfer = transfer.id, .bytes = transfer.taken_bytes};
  if (!transfer.status.ok()) {
    ++(absl::IsAborted(transfer.status) ? failed_rejected_ : failed_peer_);
    report.kind = KvReport::Kind::kFailed;
    report.error = std::string(transfer.status.message());
    transfer.finished = true;
  } else if (AllSent(transfer)) {
    report.kind = KvReport::Kind::kDone;
    transfer.finished = true;
    LogDone(transfer.id, transfer.taken_bytes, transfer.overlapped_bytes, transfer.busy);
  } else if (transfer.taken_bytes > 0 && now - transfer.last_report > kReportInterval) {
    report.kind = KvReport::Kind::kProgress;
    transfer.last_report = now;
  } else {
    return false;
  }
  reports.push_back(std::move(report));
  return true;
}

bool KvSender::Pump(absl::Time now, std::vector<KvReport>& reports) {
  CheckPeers(now);
  free_buffers_.insert(free_buffers_.end(), released_.begin(), released_.end());
  released_.clear();
  bool any = false;
  for (bool more = true; more;) {
    more = false;
    for (const auto& [id, transfer] : transfers_) {
      if (transfer->finished || !transfer->status.ok()) continue;
      for (Route& route : transfer->routes) more |= SendNext(*transfer, route, now);
    }
    any |= more;
  }
  for (const auto& [id, transfer] : transfers_) any |= Report(*transfer, now, reports);
  return any;
}

absl::Duration KvSender::IdleFor(absl::Time now) const {
  if (options_.bandwidth_limit > 0 && now < next_send_) return next_send_ - now;
  return kPeerCheck;
}

void KvSender::AddTo(KvCounters& counters) const {
  counters.sent_bytes += sent_bytes_;
  counters.sent_to = sent_to_;
  counters.overlapped_bytes += overlapped_bytes_;
  counters.failed_peer += failed_peer_;
  counters.failed_rejected += failed_rejected_;
  counters.sending += static_cast<std::int32_t>(transfers_.size());
  counters.peers += static_cast<std::int32_t>(peers_.size());
}

}  // namespace weft
