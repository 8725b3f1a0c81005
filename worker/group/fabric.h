#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace weft {

enum class PeerId : std::uint32_t {};

// What a message is for. Every channel has one handler per fabric.
enum class Channel : std::uint8_t { kControl, kPlan, kCollective, kKv };
inline constexpr int kNumChannels = 4;

// The longest message a Send() takes.
inline constexpr std::int64_t kMaxMessageBytes = std::int64_t{1} << 30;
inline constexpr std::size_t kMaxSpans = 16;
// Messages up to this long travel as one frame; longer ones are split and put together again
// before their handler runs, which costs one more copy.
inline constexpr std::int64_t kWholeMessageBytes = 8000;

// Payload bytes a fabric has moved, self-sends not counted.
struct FabricCounters {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t sent_messages = 0;
  std::uint64_t received_messages = 0;
};

// Ordered, reliable messages between the ranks of a replica and between replicas, over whatever
// UCX picks: shared memory, RDMA or TCP. Messages of one (sender, receiver) pair arrive in the
// order they were sent, over all channels.
//
// Threading: one Fabric per thread; every method and handler runs on the thread that uses it.
// Only Wake() may be called from any thread.
// Ownership: buffers given to Send() stay alive until its completion. Destruction drops what is
// in flight without calling completions.
class Fabric {
 public:
  // `payload` is valid during the call only, 8-byte aligned. `from_tag` is who sent it, as named
  // by the sender's `self_tag` (see Connect). Handlers may call Send(), not Progress() or Wait().
  // Messages of a channel without a handler are dropped.
  using Handler = std::function<void(std::uint32_t from_tag, absl::Span<const std::byte> payload)>;
  // Told once per Send(): OK when the spans may be reused, UNAVAILABLE when the peer died.
  using Done = std::function<void(const absl::Status&)>;

  virtual ~Fabric() = default;

  // The address a peer passes to Connect(); opaque, at most 4 KiB.
  virtual std::string LocalAddress() const = 0;

  // Starts a connection; sends may follow at once. The peer's handlers see `self_tag` as sender
  // (ranks use their rank). INVALID_ARGUMENT if `address` does not parse. An unreachable peer
  // shows up as UNAVAILABLE in the completion of a send, or in PeerStatus().
  virtual absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t self_tag) = 0;

  // Installs the handler of `channel`. Call once per channel, before the first Progress().
  virtual void Receive(Channel channel, Handler handler) = 0;

  // Sends the concatenation of `spans` (1..kMaxSpans of them) as one message. `done` may
  // be null; it may run inside Send() or in a later Progress(). Returns INVALID_ARGUMENT, with
  // nothing sent and `done` not called, for a message that is too long or has too many spans; a
  // dead peer is reported through `done`.
  virtual absl::Status Send(PeerId peer, Channel channel,
                            absl::Span<const absl::Span<const std::byte>> spans, Done done) = 0;

  // UNAVAILABLE once the peer is known to be dead.
  virtual absl::Status PeerStatus(PeerId peer) const = 0;

  // Forgets a peer whose PeerStatus() is not OK, and frees what it takes. The id may not be used
  // any more; a later Connect() may give it to another peer. Allowed in handlers and completions.
  // Not of peers that are alive: UCX 1.13 does not take leave of those over TCP (it keeps the
  // socket, until it loses patience with all connections to that peer).
  virtual void Disconnect(PeerId peer) = 0;

  // Drives sends, receives and the detection of dead peers; true if anything happened.
  virtual bool Progress() = 0;

  // Returns when something happened, Wake() was called, or `timeout` has passed. Makes progress
  // itself (handlers and completions may run): spins for a bounded time first, then gives the core
  // away, then sleeps. May return early.
  virtual void Wait(absl::Duration timeout) = 0;

  // Ends a Wait() of the owning thread, now or the next one. Any thread.
  virtual void Wake() = 0;

  virtual FabricCounters Counters() const = 0;
};

// Threads of one process, for tests and the simulator. Addresses are valid in this process. A peer
// is dead once its fabric is destroyed; what it had sent until then still arrives. Allocates
// nothing once its pools have grown to what is in flight.
std::unique_ptr<Fabric> MakeLocalFabric(std::string_view name);

// UNAVAILABLE when UCX finds no usable transport; the message has what UCX said. Of UCX's
// variables, UCX_TLS and UCX_NET_DEVICES choose the transports; ucx_context.cc has our defaults.
//
// A process of this host that exits is noticed at once while we Wait(), one of another host when
// its connection breaks, one that is stopped not at all. Over shared memory all senders of a
// receiver share one queue, and a sender killed in the middle of a send may block it for the others
// (11 of 40 kills under load): that suits a group, which restarts whole. A fabric that has to
// outlive its peers must leave shared memory out (over TCP, 0 of 20).
//
// kBetweenGroups leaves shared memory out. UCX_TLS, if it is set, is for fabrics of either kind.
enum class UcxReach : std::uint8_t { kWithinGroup, kBetweenGroups };
absl::StatusOr<std::unique_ptr<Fabric>> MakeUcxFabric(UcxReach reach = UcxReach::kWithinGroup);

}  // namespace weft
