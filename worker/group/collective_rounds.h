#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/group/collective_mux.h"
#include "worker/group/communicator.h"
#include "worker/group/fabric.h"
#include "worker/group/message_ring.h"

namespace weft {

// What a message belongs to, on the wire. An all-reduce of many bytes is two rounds.
enum Operation : std::uint32_t {
  kAllReduceDirect,
  kAllReduceScatter,
  kAllReduceGather,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kGatherGo,
  // With inputs that are read where they lie.
  kSharedAllReduceScatter,
  kSharedAllReduceGather,
  kSharedAllGather,
  kSharedReduceScatter,
  kSharedAllToAll,
  kLeaveShared,
  kMeetWindows,
  kNumOperations,
};

// Rounds are what collectives are made of: in a round each rank sends at most one buffer to each
// other rank and receives at most one from each, and a round ends when all of it is there. What a
// peer that is ahead sends for later rounds waits in a ring of its own.
//
// Trusts nothing on the wire: what does not fit the round is an INTERNAL error that names both
// sides' calls; what comes from a stranger is counted and dropped.
//
// Threading: the fabric's thread; Abort() from any.
class CollectiveRounds final : public CollectiveMux::Receiver {
 public:
  // What goes to and comes from one rank in the next round. Set it up, then Run().
  class Flow {
   public:
    void Send(const void* from, std::int64_t bytes) {
      sends_ = true;
      send_from_ = static_cast<const std::byte*>(from);
      send_bytes_ = bytes;
    }
    void Receive(void* to, std::int64_t bytes) {
      receives_ = true;
      receive_to_ = static_cast<std::byte*>(to);
      receive_bytes_ = bytes;
      received_bytes_ = added_bytes_ = 0;
      add_to_ = nullptr;
    }
    // Lets arriving floats be added to `own` at once, into `out` (in rank order), instead of being
    // put where Receive() said. Nothing is written before everything of this rank is sent, so
    // `out` may be what it sends. added_bytes() says afterwards how much was.
    void AddTo(const float* own, float* out) {
      add_to_ = own;
      sum_out_ = out;
    }
    std::int64_t added_bytes() const { return added_bytes_; }

   private:
    friend class CollectiveRounds;
    Flow(PeerId peer, std::size_t ring_bytes) : peer_(peer), staged_(ring_bytes) {}

    PeerId peer_;
    MessageRing staged_;
    bool sends_ = false;
    bool receives_ = false;  // until all is there
    const std::byte* send_from_ = nullptr;
    std::byte* receive_to_ = nullptr;
    std::int64_t send_bytes_ = 0;
    std::int64_t receive_bytes_ = 0;
    std::int64_t received_bytes_ = 0;
    std::int64_t added_bytes_ = 0;
    const float* add_to_ = nullptr;
    float* sum_out_ = nullptr;
  };

  // `max_flow_bytes`: the most that one rank sends another in a round. Peers may be
  // kMaxRoundsAhead rounds ahead, with that many bytes in at most 2 of them.
  CollectiveRounds(std::shared_ptr<CollectiveMux> mux, int rank, absl::Span<const PeerId> peers,
                   absl::Span<const std::uint32_t> tags, std::int64_t max_flow_bytes,
                   const FabricCommunicatorOptions& options);
  ~CollectiveRounds() override;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(tags_.size()); }
  std::uint64_t received_bytes() const { return received_bytes_; }
  std::int64_t staging_bytes() const {
    std::int64_t bytes = 0;
    for (const Flow& flow : flows_) bytes += static_cast<std::int64_t>(flow.staged_.size_bytes());
    return bytes;
  }

  // body(rank, flow) for every other rank.
  template <typename Body>
  void ForEachPeer(Body body) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) body(r, flows_[static_cast<std::size_t>(r)]);
    }
  }

  // Runs the round that the flows describe. `bytes` is the size the caller gave to `operation`:
  // all ranks must agree on it. Errors as in communicator.h.
  absl::Status Run(Operation operation, std::int64_t bytes);

  // Ends this communicator, unless an error has done so.
  void Fail(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  // The error that ended this communicator, or OK.
  const absl::Status& CheckStatus();

  void Abort();

  void OnMessage(std::uint32_t from_tag, const CollectiveHeader& header,
                 absl::Span<const std::byte> payload) override;
  void OnSent(const absl::Status& status) override;

 private:
  static constexpr std::uint32_t kMaxRoundsAhead = 4;

  void SendPieces();
  void TakeStaged();
  void WaitForEnd();
  // UNAVAILABLE if a rank is dead whose part is missing, or `any` rank.
  absl::Status LostPeer(bool any) const;
  absl::Status Stalled() const;
  void Place(int from, const CollectiveHeader& header, absl::Span<const std::byte> payload);
  void Put(int from, Flow& flow, absl::Span<const std::byte> payload);
  std::string Describe(std::uint32_t operation, std::uint64_t bytes, std::uint32_t round) const;
  std::string DescribeCurrent() const { return Describe(operation_, operation_bytes_, round_); }

  const std::shared_ptr<CollectiveMux> mux_;
  Fabric& fabric_;
  const std::uint32_t id_;
  const absl::Duration stall_timeout_;
  const int rank_;
  const std::vector<std::uint32_t> tags_;
  std::vector<Flow> flows_;              // by rank
  CollectiveHeader* headers_ = nullptr;  // of the pieces of the current round; the mux keeps them

  absl::Status status_;      // the first error; final
  std::uint32_t round_ = 0;  // the current one, or the next one
  bool in_round_ = false;
  Operation operation_{};
  std::uint64_t operation_bytes_ = 0;
  int missing_ = 0;           // ranks whose part has not arrived
  int pending_sends_ = 0;     // pieces the fabric may still read
  bool all_sent_ = false;     // all pieces are with the fabric
  std::uint64_t events_ = 0;  // messages and ends of sends
  std::uint64_t received_bytes_ = 0;
  std::uint64_t strange_messages_ = 0;
  std::atomic<bool> aborted_{false};
};

}  // namespace weft
