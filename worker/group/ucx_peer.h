#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ucp/api/ucp.h"
#include "worker/group/fabric.h"
#include "worker/group/frame_assembler.h"

namespace weft {

inline constexpr unsigned kUcxFrameId = 1;  // UCX's number for the active message that is a frame

class UcxPeer;

// One Send() on its way.
struct UcxMessage {
  UcxPeer* peer = nullptr;
  Channel channel{};
  std::array<absl::Span<const std::byte>, kMaxSpans> spans;
  std::uint64_t bytes = 0;
  // What is not yet in a frame.
  std::uint64_t left = 0;
  std::size_t next_span = 0;
  std::size_t next_offset = 0;
  int frames_in_flight = 0;
  bool all_sent = false;  // no more frames will be made
  absl::Status status;
  Fabric::Done done;
  UcxMessage* next = nullptr;
};

// Frames up to this long are copied together and sent as one piece: UCX's path for those is
// shorter than the one for lists of spans.
inline constexpr std::size_t kGatherBytes = 1024;

// One frame that UCX may still read.
struct UcxFrame {
  UcxMessage* message = nullptr;
  std::array<ucp_dt_iov_t, kMaxSpans + 1> iov;
  alignas(8) std::byte bytes[kGatherBytes];  // the header, or all of a short frame
  UcxFrame* next = nullptr;
};

// Objects that are reused, and freed with the pool only.
template <typename T>
class Pool {
 public:
  void Grow(int count) {
    for (int i = 0; i < count; ++i) Put(&all_.emplace_back());
  }
  T* Get() {
    if (free_ == nullptr) Grow(1);
    T* const object = free_;
    free_ = object->next;
    object->next = nullptr;
    return object;
  }
  void Put(T* object) {
    object->next = free_;
    free_ = object;
  }

 private:
  std::deque<T> all_;
  T* free_ = nullptr;
};

// What the peers of a fabric share. Outlives the UCX worker.
struct UcxSendState {
  explicit UcxSendState(std::int64_t frame_payload_bytes)
      : frame_payload_bytes(static_cast<std::uint64_t>(frame_payload_bytes)) {}

  const std::uint64_t frame_payload_bytes;  // at most
  Pool<UcxMessage> messages;
  Pool<UcxFrame> frames;
  std::uint64_t events = 0;  // counts up whenever something happened
  bool any_failure = false;  // some peer wants BuryIfDead()
  int num_peers = 0;         // now
  int most_peers = 0;        // that the pools have grown for
  bool closing = false;      // completions are not called any more
};

// The sending side of one connection: cuts messages into frames and hands them to UCX in order.
//
// Threading: the fabric's thread.
class UcxPeer {
 public:
  // Starts to connect to UCX's address of a worker, whose fabric wants `key`; it must not be
  // damaged, or UCX crashes.
  static absl::StatusOr<std::unique_ptr<UcxPeer>> Connect(ucp_worker_h worker,
                                                          std::string_view ucx_address,
                                                          std::uint64_t key, std::uint32_t self_tag,
                                                          UcxSendState& state);

  ~UcxPeer() { --state_.num_peers; }

  std::uint64_t connection() const { return connection_; }
  bool busy() const { return head_ != nullptr || frames_in_flight_ > 0; }
  // UCX knows nothing of it any more: it may be destroyed.
  bool gone() const { return endpoint_ == nullptr && !closing_ && !busy(); }
  // UNAVAILABLE once buried.
  const absl::Status& status() const { return status_; }

  // `spans`, of `bytes` together, stay valid until `done`.
  void Send(Channel channel, absl::Span<const absl::Span<const std::byte>> spans,
            std::uint64_t bytes, Fabric::Done done);

  // Hands waiting frames to UCX while its window has room.
  void Pump();

  // The peer is dead, UCX noticed or not; BuryIfDead() does the rest.
  void Fail(ucs_status_t status);

  // After a failure: closes the endpoint and fails what waits.
  void BuryIfDead();

  // Drops the endpoint and what it had in flight.
  void Close();

 private:
  UcxPeer(std::uint64_t key, std::uint32_t self_tag, UcxSendState& state);

  static void OnFrameSent(void* request, ucs_status_t status, void* frame);
  static void OnFailure(void* self, ucp_ep_h endpoint, ucs_status_t status);

  ucs_status_ptr_t SendFrame(UcxMessage& message, UcxFrame& frame);
  ucs_status_ptr_t Post(UcxFrame& frame, const void* buffer, std::size_t count,
                        ucp_datatype_t datatype);
  void FrameEnded(UcxFrame& frame, ucs_status_t status);
  void Finish(UcxMessage& message);

  UcxSendState& state_;
  ucp_ep_h endpoint_ = nullptr;  // null once closed
  bool closing_ = false;         // UCX has not yet said that it is
  const std::uint64_t key_;      // of the receiver
  const std::uint32_t self_tag_;
  const std::uint64_t connection_;
  std::uint32_t next_sequence_ = 0;
  ucs_status_t failure_ = UCS_OK;  // the first one
  absl::Status status_;
  int frames_in_flight_ = 0;
  bool pumping_ = false;
  UcxMessage* head_ = nullptr;  // waiting or partly sent, in order
  UcxMessage* tail_ = nullptr;
};

}  // namespace weft
