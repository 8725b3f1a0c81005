#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/engine/step_plan.h"
#include "worker/group/fabric.h"
#include "worker/group/shared_memory.h"
#include "worker/model/step_rows.h"
#include "worker/transfer/kv_copier.h"
#include "worker/transfer/kv_message.h"
#include "worker/transfer/kv_rank.h"

namespace weft {

// Stores KV that comes from other groups in the blocks that a transfer has. Rows of a transfer that
// is not open are dropped and counted.
//
// One thread at a time; what takes messages runs on the fabric's.
class KvReceiver {
 public:
  // `copier` is of this rank's KV.
  KvReceiver(Fabric& fabric, const KvRank& rank, KvCopier& copier, const KvMoverOptions& options)
      : fabric_(fabric),
        rank_(rank),
        copier_(copier),
        checksum_(options.checksum),
        shared_memory_(options.shared_memory) {}

  void Open(const KvOp& op, const SlotTable& slots, std::vector<KvReport>& reports);
  void Close(std::uint64_t transfer) { transfers_.erase(transfer); }

  void OnHello(const KvMessage& message);
  // kOffer and kRows; `now` is for reports of progress.
  void OnRows(const KvMessage& message, absl::Time now, std::vector<KvReport>& reports);

  // Forgets connections that are gone.
  void DropDeadPeers();
  void AddTo(KvCounters& counters) const;

 private:
  struct Transfer {
    std::int64_t first_position = 0;
    std::int64_t end_position = 0;
    std::vector<std::int32_t> table;
    std::int64_t bytes_left = 0;
    std::int64_t bytes = 0;
    bool failed = false;
    absl::Time last_report;
  };
  struct Peer {
    PeerId id{};
    std::string address;
    std::optional<ShardLayout> layout;  // none: refused
    std::optional<PeerMemory> memory;   // its staging; none: not to be read
  };

  // NOT_FOUND if there is none to the rank at `address`.
  absl::StatusOr<PeerId> TakeConnection(std::string_view address);
  // Why the KV of a peer is refused; empty: it is not.
  std::string CheckHello(const KvMessage& message, Peer& peer, std::string& address) const;
  absl::Status CheckRows(const KvMessage& message, const Transfer& transfer,
                         const ShardLayout& from) const;
  // The whole message that is offered, where it is.
  static absl::StatusOr<absl::Span<const std::byte>> FindOffer(const KvMessage& offer,
                                                               const PeerMemory& memory);
  // Rows of a transfer and a peer that are known.
  absl::Status Store(const KvMessage& message, const Peer& peer, Transfer& transfer);
  absl::Status StoreOffer(const KvMessage& offer, const Peer& peer, Transfer& transfer);
  void Answer(const Peer& peer, KvMessageType type, const KvMessage& to, std::string_view text);

  Fabric& fabric_;
  const KvRank& rank_;
  KvCopier& copier_;
  const bool checksum_;
  const bool shared_memory_;
  absl::flat_hash_map<std::uint64_t, Transfer> transfers_;
  absl::flat_hash_map<std::uint64_t, Peer> peers_;  // by connection
  std::int64_t received_bytes_ = 0;
  std::vector<std::int64_t> received_from_;  // KvCounters::received_from
  std::int64_t read_bytes_ = 0;
  std::int64_t dropped_messages_ = 0;
  std::int64_t failed_ = 0;
};

// Sends a message whose payload is `text`, which is copied.
void SendKvText(Fabric& fabric, PeerId to, KvMessage message, std::string_view text);

}  // namespace weft
