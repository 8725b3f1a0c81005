#include "worker/group/ucx_peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/base/draw.h"
#include "worker/group/ucx_context.h"

namespace weft {
namespace {

// Frames of one peer that UCX may hold at a time; the rest waits here, so that a large message
// does not turn into thousands of requests.
constexpr int kWindowFrames = 32;
// Messages of one peer that may wait before the pool has to grow.
constexpr int kPooledMessages = 64;

}  // namespace

UcxPeer::UcxPeer(std::uint64_t key, std::uint32_t self_tag, UcxSendState& state)
    : state_(state), key_(key), self_tag_(self_tag), connection_(DrawUint64()) {
  if (++state.num_peers <= state.most_peers) return;
  state.most_peers = state.num_peers;
  state.frames.Grow(kWindowFrames);
  state.messages.Grow(kPooledMessages);
}

absl::StatusOr<std::unique_ptr<UcxPeer>> UcxPeer::Connect(ucp_worker_h worker,
                                                          std::string_view ucx_address,
                                                          std::uint64_t key, std::uint32_t self_tag,
                                                          UcxSendState& state) {
  std::unique_ptr<UcxPeer> peer(new UcxPeer(key, self_tag, state));
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(ucx_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &OnFailure;
  params.err_handler.arg = peer.get();
  if (ucs_status_t status = ucp_ep_create(worker, &params, &peer->endpoint_); status != UCS_OK) {
    return UcxError("ucp_ep_create", status);
  }
  return peer;
}

void UcxPeer::Send(Channel channel, absl::Span<const absl::Span<const std::byte>> spans,
                   std::uint64_t bytes, Fabric::Done done) {
  if (!status_.ok()) {
    if (done) done(status_);
    return;
  }
  UcxMessage& message = *state_.messages.Get();
  message.peer = this;
  message.channel = channel;
  std::copy(spans.begin(), spans.end(), message.spans.begin());
  message.bytes = message.left = bytes;
  message.next_span = message.next_offset = 0;
  message.frames_in_flight = 0;
  message.all_sent = false;
  message.done = std::move(done);
  (tail_ == nullptr ? head_ : tail_->next) = &message;
  tail_ = &message;
  Pump();
}

void UcxPeer::Pump() {
  // A completion that sends comes back here; the loop that is running takes care of it.
  if (pumping_) return;
  pumping_ = true;
  while (head_ != nullptr && frames_in_flight_ < kWindowFrames && failure_ == UCS_OK) {
    UcxMessage& message = *head_;
    UcxFrame& frame = *state_.frames.Get();
    frame.message = &message;
    ++message.frames_in_flight;
    ++frames_in_flight_;
    const ucs_status_ptr_t request = SendFrame(message, frame);
    if (message.left == 0) {
      message.all_sent = true;
      head_ = std::exchange(message.next, nullptr);
      if (head_ == nullptr) tail_ = nullptr;
    }
    if (UCS_PTR_IS_ERR(request)) Fail(UCS_PTR_STATUS(request));
    if (!UCS_PTR_IS_PTR(request)) FrameEnded(frame, UCS_PTR_STATUS(request));
  }
  pumping_ = false;
}

ucs_status_ptr_t UcxPeer::SendFrame(UcxMessage& message, UcxFrame& frame) {
  const std::uint64_t payload = std::min(message.left, state_.frame_payload_bytes);
  const FrameHeader header = {.magic = kFrameMagic,
                              .from_tag = self_tag_,
                              .connection = connection_,
                              .sequence = next_sequence_++,
                              .channel = static_cast<std::uint8_t>(message.channel),
                              .reserved = {},
                              .message_bytes = message.bytes,
                              .key = key_};
  std::memcpy(frame.bytes, &header, sizeof(header));
  frame.iov[0] = {frame.bytes, sizeof(header)};
  std::size_t num_iov = 1;
  std::size_t gathered = sizeof(header);
  const bool gather = sizeof(header) + payload <= kGatherBytes;
  for (std::uint64_t left = payload; left > 0;) {
    const absl::Span<const std::byte> span = message.spans[message.next_span];
    const std::size_t n = std::min<std::uint64_t>(left, span.size() - message.next_offset);
    const std::byte* const from = span.data() + message.next_offset;
    if (gather) {
      if (n > 0) std::memcpy(frame.bytes + gathered, from, n);
      gathered += n;
    } else if (n > 0) {
      frame.iov[num_iov++] = {const_cast<std::byte*>(from), n};
    }
    left -= n;
    message.next_offset += n;
    if (message.next_offset == span.size()) {
      ++message.next_span;
      message.next_offset = 0;
    }
  }
  message.left -= payload;
  return gather ? Post(frame, frame.bytes, gathered, ucp_dt_make_contig(1))
                : Post(frame, frame.iov.data(), num_iov, ucp_dt_make_iov());
}

ucs_status_ptr_t UcxPeer::Post(UcxFrame& frame, const void* buffer, std::size_t count,
                               ucp_datatype_t datatype) {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                       UCP_OP_ATTR_FIELD_DATATYPE;
  // One protocol for all: a frame fits an eager packet of every transport.
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &OnFrameSent;
  param.user_data = &frame;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.datatype = datatype;
  return ucp_am_send_nbx(endpoint_, kUcxFrameId, nullptr, 0, buffer, count, &param);
}

void UcxPeer::OnFrameSent(void* request, ucs_status_t status, void* arg) {
  UcxFrame& frame = *static_cast<UcxFrame*>(arg);
  ucp_request_free(request);
  frame.message->peer->FrameEnded(frame, status);
}

void UcxPeer::FrameEnded(UcxFrame& frame, ucs_status_t status) {
  UcxMessage& message = *frame.message;
  state_.frames.Put(&frame);
  ++state_.events;
  --message.frames_in_flight;
  --frames_in_flight_;
  if (status != UCS_OK && message.status.ok()) message.status = UcxError("send", status);
  if (message.all_sent && message.frames_in_flight == 0) Finish(message);
}

void UcxPeer::Finish(UcxMessage& message) {
  if (state_.closing) return;
  const Fabric::Done done = std::exchange(message.done, nullptr);
  const absl::Status status = std::exchange(message.status, absl::OkStatus());
  state_.messages.Put(&message);
  if (done) done(status);
}

void UcxPeer::OnFailure(void* self, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  // UCX forbids closing the endpoint from here: BuryIfDead() does.
  static_cast<UcxPeer*>(self)->Fail(status);
}

void UcxPeer::Fail(ucs_status_t status) {
  if (failure_ == UCS_OK) failure_ = status;
  state_.any_failure = true;
}

void UcxPeer::BuryIfDead() {
  if (failure_ == UCS_OK || !status_.ok()) return;
  ++state_.events;
  status_ = UcxError("lost the peer", failure_);
  Close();
  UcxMessage* message = std::exchange(head_, nullptr);
  tail_ = nullptr;
  while (message != nullptr) {
    UcxMessage* const next = std::exchange(message->next, nullptr);
    message->status = status_;
    message->all_sent = true;
    if (message->frames_in_flight == 0) Finish(*message);
    message = next;
  }
}

void UcxPeer::Close() {
  if (endpoint_ == nullptr) return;
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.user_data = this;
  param.cb.send = [](void* request, ucs_status_t, void* self) {
    ucp_request_free(request);
    static_cast<UcxPeer*>(self)->closing_ = false;
  };
  const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  closing_ = UCS_PTR_IS_PTR(request);
}

}  // namespace weft
