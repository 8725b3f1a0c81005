#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/engine/step_plan.h"
#include "worker/group/fabric.h"
#include "worker/group/shared_memory.h"
#include "worker/model/step_rows.h"
#include "worker/transfer/kv_copier.h"
#include "worker/transfer/kv_message.h"
#include "worker/transfer/kv_rank.h"
#include "worker/transfer/kv_routes.h"

namespace weft {

// The most bytes of rows in a message that a rank sends: 16 rows of all its heads fit, so that it
// gets on.
std::int64_t KvMessageBytes(const KvRank& rank, const KvMoverOptions& options);

// Sends KV to the ranks of other groups, as soon as it is there. What is on its way is bounded
// twice: by the staging buffers, and by what each peer has not yet taken.
//
// One thread at a time; Pump() and what takes messages run on the fabric's.
class KvSender {
 public:
  // `copier` is of this rank's KV, and takes KvMessageBytes() at once.
  KvSender(Fabric& fabric, const KvRank& rank, KvCopier& copier, const KvMoverOptions& options);
  ~KvSender();

  // kSend, kSendRows. What cannot be done is reported by Pump().
  void Open(const KvOp& op);
  void AddRows(const KvOp& op, const SlotTable& slots);
  void Close(std::uint64_t transfer);
  // The rows of this step are there in `layer` and before. False when nothing is to be sent of it.
  bool OnLayerStored(std::int32_t layer);
  bool OnStepEnd();

  // kWelcome, kTaken, kRejected.
  void OnAnswer(const KvMessage& message, absl::Time now);
  // Connects, sends what may be sent, and notices what has ended. True if it did anything.
  bool Pump(absl::Time now, std::vector<KvReport>& reports);
  // How long nothing has to be done, if no message comes and no step goes on.
  absl::Duration IdleFor(absl::Time now) const;

  void AddTo(KvCounters& counters) const;

 private:
  struct Peer;
  struct Route {
    KvRoute route;
    std::string address;
    // What is sent next.
    std::size_t range = 0;
    std::int32_t layer = 0;
    std::int64_t position = -1;  // -1: the range's first
  };
  struct Rows {
    std::int64_t first_position = 0;
    std::int64_t end_position = 0;
    std::int32_t layers_ready = 0;
  };
  struct Transfer {
    std::uint64_t id = 0;
    std::vector<ShardLayout> to;
    std::vector<Route> routes;
    std::vector<std::int32_t> table;
    std::vector<Rows> rows;
    bool last_known = false;  // no rows will be added
    bool computed = false;    // likewise, and all are there
    bool in_step = false;     // rows.back() is of the step that runs
    std::int64_t taken_end = 0;
    std::int64_t in_flight = 0;  // bytes sent and not taken
    std::int64_t taken_bytes = 0;
    std::int64_t overlapped_bytes = 0;  // sent before the prompt was computed
    absl::Time busy_since;              // while in_flight > 0
    absl::Duration busy;                // before that
    bool finished = false;              // reported as done or failed
    absl::Status status;
    absl::Time last_report;
  };

  absl::Status ParseTarget(const KvOp& op, Transfer& transfer) const;
  Peer& Connect(const std::string& address, absl::Time now);
  void CheckPeers(absl::Time now);
  void Lose(Peer& peer, const absl::Status& why);
  // One message of the route, if there is one that may go.
  bool SendNext(Transfer& transfer, Route& route, absl::Time now);
  // Moves to the next rows that are there; false if there are none.
  bool Advance(const Transfer& transfer, Route& route) const;
  void SendRows(Peer& peer, Transfer& transfer, const Route& route, const KvRowRange& range,
                int buffer, std::int64_t bytes, absl::Time now);
  std::byte* BufferAt(int buffer) const;
  // Of offers.
  void Wipe(int buffer);
  void Release(int buffer);
  bool Report(Transfer& transfer, absl::Time now, std::vector<KvReport>& reports);
  bool AllSent(const Transfer& transfer) const;

  Fabric& fabric_;
  const KvRank& rank_;
  KvCopier& copier_;
  const KvMoverOptions options_;
  const std::int64_t buffer_bytes_;  // of the payload of a message
  SharedMemory staging_;
  std::vector<int> free_buffers_;  // of the fabric's thread
  std::vector<int> released_;      // free from the next Pump() on
  absl::flat_hash_map<std::uint64_t, std::unique_ptr<Transfer>> transfers_;
  absl::flat_hash_map<std::string, std::unique_ptr<Peer>> peers_;  // by address
  std::int64_t sent_bytes_ = 0;
  std::vector<std::int64_t> sent_to_;  // KvCounters::sent_to
  std::int64_t overlapped_bytes_ = 0;
  std::int64_t failed_peer_ = 0;
  std::int64_t failed_rejected_ = 0;
  absl::Time next_send_;  // with a bandwidth limit
};

}  // namespace weft
