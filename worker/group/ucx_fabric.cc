#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "worker/group/fabric.h"
#include "worker/group/frame_assembler.h"
#include "worker/group/ucx_context.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kAmId = 1;

// How Wait() passes its time. Spinning answers in a microsecond but starves whoever else needs the
// core; yielding costs about one microsecond more and lets 4 ranks share 2 cores; sleeping costs
// the sender a system call and us the way through the scheduler (5-50 us).
constexpr int kSpins = 16;
constexpr auto kYieldFor = std::chrono::microseconds(300);
// UCX looks after its peers only when it is called.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(500);
constexpr auto kFullQueueNap = std::chrono::microseconds(200);

inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Frames of one peer that UCX may hold at a time; the rest waits here, so that a large message
// does not turn into thousands of requests.
constexpr int kWindowFrames = 32;

// Frames up to this long are copied together and sent as one piece: UCX's path for those is
// shorter than the one for lists of spans.
constexpr std::size_t kGatherBytes = 1024;

// The address of a fabric: this, then UCX's own.
struct AddressHeader {
  std::uint32_t magic;  // kAddressMagic
  std::uint32_t ucx_bytes;
  std::uint64_t checksum;  // UCX crashes on an address that is damaged
};
constexpr std::uint32_t kAddressMagic = 0x41544657;  // "WFTA"
constexpr std::size_t kMaxAddressBytes = 4096;

std::uint64_t Checksum(absl::Span<const char> bytes) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

class UcxFabric;
struct Peer;

// One Send() on its way.
struct Outgoing {
  Peer* peer = nullptr;
  Channel channel{};
  std::array<absl::Span<const std::byte>, kMaxSpans> spans;
  std::size_t num_spans = 0;
  std::uint64_t bytes = 0;
  // What is not yet in a frame.
  std::uint64_t left = 0;
  std::size_t next_span = 0;
  std::size_t next_offset = 0;
  int frames_in_flight = 0;
  bool all_sent = false;  // every frame is with UCX
  absl::Status status;
  Fabric::Done done;
  Outgoing* next = nullptr;
};

// One frame that UCX may still read.
struct Frame {
  Outgoing* message = nullptr;
  std::array<ucp_dt_iov_t, kMaxSpans + 1> iov;
  alignas(8) std::byte bytes[kGatherBytes];
  Frame* next = nullptr;
};

// Objects that are reused and never freed before the pool is.
template <typename T>
class Pool {
 public:
  T* Get() {
    if (free_ == nullptr) return &all_.emplace_back();
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

struct Peer {
  UcxFabric* fabric = nullptr;
  ucp_ep_h endpoint = nullptr;  // null once closed
  std::uint32_t self_tag = 0;
  std::uint64_t connection = 0;
  std::uint32_t next_sequence = 0;
  bool is_self = false;
  ucs_status_t failure = UCS_OK;  // set by UCX's callback
  absl::Status status;            // set once the failure was dealt with
  int frames_in_flight = 0;
  bool pumping = false;
  Outgoing* head = nullptr;  // waiting or partly sent, in order
  Outgoing* tail = nullptr;
};

class UcxFabric final : public Fabric, public FrameAssembler::Sink {
 public:
  static absl::StatusOr<std::unique_ptr<Fabric>> Make() {
    ASSIGN_OR_RETURN(UcpContext context, MakeUcpContext());
    ASSIGN_OR_RETURN(UcpWorker worker, MakeUcpWorker(context.get()));
    std::unique_ptr<UcxFabric> fabric(new UcxFabric(std::move(context), std::move(worker)));
    RETURN_IF_ERROR(fabric->Start());
    return fabric;
  }

  ~UcxFabric() override;

  std::string LocalAddress() const override { return address_; }
  absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t self_tag) override;
  void Receive(Channel channel, Handler handler) override;
  absl::Status Send(PeerId peer, Channel channel,
                    absl::Span<const absl::Span<const std::byte>> spans, Done done) override;
  absl::Status PeerStatus(PeerId peer) const override { return At(peer).status; }
  bool Progress() override;
  void Wait(absl::Duration timeout) override;
  void Wake() override;
  FabricCounters Counters() const override { return counters_; }

  void OnMessage(const FrameHeader& header, absl::Span<const std::byte> payload) override;

 private:
  UcxFabric(UcpContext context, UcpWorker worker)
      : context_(std::move(context)), worker_(std::move(worker)), assembler_(*this) {}

  absl::Status Start();

  static ucs_status_t OnFrame(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t bytes, const ucp_am_recv_param_t* param);
  static void OnFrameSent(void* request, ucs_status_t status, void* frame);
  static void OnPeerFailure(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  Peer& At(PeerId peer) const {
    const auto index = static_cast<std::size_t>(peer);
    CHECK_MSG(index < peers_.size(), "a PeerId comes from Connect()");
    return *peers_[index];
  }

  void Pump(Peer& peer);
  ucs_status_ptr_t SendFrame(Peer& peer, Outgoing& message, Frame& frame);
  void FrameEnded(Frame& frame, ucs_status_t status);
  void Finish(Outgoing& message);
  void BuryTheDead();
  void Close(Peer& peer);
  bool SendsInFlight() const;
  void Sleep(std::chrono::nanoseconds limit);

  // Destroyed last to first: the worker before its context, both after what their callbacks use.
  Pool<Outgoing> messages_;
  Pool<Frame> frames_;
  UcpContext context_;
  UcpWorker worker_;
  FrameAssembler assembler_;
  std::string address_;
  int event_fd_ = -1;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::array<Handler, kNumChannels> handlers_;
  FabricCounters counters_;
  std::uint64_t events_ = 0;
  bool any_failure_ = false;
  bool closing_ = false;  // nobody is called any more
  std::vector<std::uint64_t> self_connections_;
  std::atomic<bool> woken_{false};
  std::atomic<bool> sleeping_{false};
};

absl::Status UcxFabric::Start() {
  if (ucs_status_t status = ucp_worker_get_efd(worker_.get(), &event_fd_); status != UCS_OK) {
    return UcxError("ucp_worker_get_efd", status);
  }
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kAmId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &OnFrame;
  handler.arg = this;
  if (ucs_status_t status = ucp_worker_set_am_recv_handler(worker_.get(), &handler);
      status != UCS_OK) {
    return UcxError("ucp_worker_set_am_recv_handler", status);
  }

  ucp_address_t* ucx_address = nullptr;
  std::size_t ucx_bytes = 0;
  if (ucs_status_t status = ucp_worker_get_address(worker_.get(), &ucx_address, &ucx_bytes);
      status != UCS_OK) {
    return UcxError("ucp_worker_get_address", status);
  }
  const absl::Span<const char> blob(reinterpret_cast<const char*>(ucx_address), ucx_bytes);
  const AddressHeader header = {kAddressMagic, static_cast<std::uint32_t>(ucx_bytes),
                                Checksum(blob)};
  address_.assign(reinterpret_cast<const char*>(&header), sizeof(header));
  address_.append(blob.data(), blob.size());
  ucp_worker_release_address(worker_.get(), ucx_address);
  if (address_.size() > kMaxAddressBytes) {
    return absl::UnavailableError(
        fmt::format("UCX's address takes {} bytes, over {}: restrict UCX_NET_DEVICES",
                    address_.size(), kMaxAddressBytes));
  }
  return absl::OkStatus();
}

UcxFabric::~UcxFabric() {
  closing_ = true;
  for (const std::unique_ptr<Peer>& peer : peers_) Close(*peer);
  // Lets UCX give up what the closed endpoints still had.
  for (int i = 0; i < 1000 && SendsInFlight(); ++i) ucp_worker_progress(worker_.get());
  worker_.reset();  // while what its callbacks use is still there
}

absl::StatusOr<PeerId> UcxFabric::Connect(std::string_view address, std::uint32_t self_tag) {
  AddressHeader header;
  if (address.size() < sizeof(header) || address.size() > kMaxAddressBytes) {
    return absl::InvalidArgumentError(
        fmt::format("a fabric address of {} bytes; they have {} to {}", address.size(),
                    sizeof(header), kMaxAddressBytes));
  }
  std::memcpy(&header, address.data(), sizeof(header));
  const std::string_view blob = address.substr(sizeof(header));
  if (header.magic != kAddressMagic || header.ucx_bytes != blob.size() ||
      header.checksum != Checksum(blob)) {
    return absl::InvalidArgumentError("not the address of a UCX fabric, or a damaged one");
  }

  auto peer = std::make_unique<Peer>();
  std::random_device random;
  peer->connection = (std::uint64_t{random()} << 32) | random();
  peer->self_tag = self_tag;
  peer->fabric = this;
  peer->is_self = address == address_;
  if (peer->is_self) self_connections_.push_back(peer->connection);
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(blob.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &OnPeerFailure;
  params.err_handler.arg = peer.get();
  if (ucs_status_t status = ucp_ep_create(worker_.get(), &params, &peer->endpoint);
      status != UCS_OK) {
    return UcxError("ucp_ep_create", status);
  }
  peers_.push_back(std::move(peer));
  return PeerId{static_cast<std::uint32_t>(peers_.size() - 1)};
}

void UcxFabric::Receive(Channel channel, Handler handler) {
  Handler& slot = handlers_[static_cast<std::size_t>(channel)];
  CHECK_MSG(slot == nullptr, "a channel has one handler");
  slot = std::move(handler);
}

// --- Sending -------------------------------------------------------------------------------

absl::Status UcxFabric::Send(PeerId to, Channel channel,
                             absl::Span<const absl::Span<const std::byte>> spans, Done done) {
  std::uint64_t bytes = 0;
  for (const absl::Span<const std::byte> span : spans) bytes += span.size();
  if (spans.empty() || spans.size() > kMaxSpans || bytes > std::uint64_t{kMaxMessageBytes}) {
    return absl::InvalidArgumentError(
        fmt::format("a message of {} bytes in {} spans; allowed are {} bytes in 1 to {} spans",
                    bytes, spans.size(), kMaxMessageBytes, kMaxSpans));
  }
  Peer& peer = At(to);
  if (!peer.status.ok()) {
    if (done) done(peer.status);
    return absl::OkStatus();
  }
  Outgoing& message = *messages_.Get();
  message.peer = &peer;
  message.channel = channel;
  std::copy(spans.begin(), spans.end(), message.spans.begin());
  message.num_spans = spans.size();
  message.bytes = message.left = bytes;
  message.next_span = message.next_offset = 0;
  message.frames_in_flight = 0;
  message.all_sent = false;
  message.status = absl::OkStatus();
  message.done = std::move(done);
  message.next = nullptr;
  (peer.tail == nullptr ? peer.head : peer.tail->next) = &message;
  peer.tail = &message;
  if (!peer.is_self) {
    counters_.sent_bytes += bytes;
    ++counters_.sent_messages;
  }
  Pump(peer);
  return absl::OkStatus();
}

// Hands frames to UCX, in order, up to the window.
void UcxFabric::Pump(Peer& peer) {
  // A completion that sends comes back here; the loop that is running takes care of it.
  if (peer.pumping) return;
  peer.pumping = true;
  while (peer.head != nullptr && peer.frames_in_flight < kWindowFrames && peer.failure == UCS_OK &&
         peer.endpoint != nullptr) {
    Outgoing& message = *peer.head;
    Frame& frame = *frames_.Get();
    frame.message = &message;
    ++message.frames_in_flight;
    ++peer.frames_in_flight;
    const ucs_status_ptr_t request = SendFrame(peer, message, frame);
    message.all_sent = message.left == 0;
    if (message.all_sent) {
      peer.head = message.next;
      if (peer.head == nullptr) peer.tail = nullptr;
    }
    if (UCS_PTR_IS_ERR(request)) {
      peer.failure = UCS_PTR_STATUS(request);
      any_failure_ = true;
      FrameEnded(frame, peer.failure);
    } else if (request == nullptr) {
      FrameEnded(frame, UCS_OK);
    }
  }
  peer.pumping = false;
}

ucs_status_ptr_t UcxFabric::SendFrame(Peer& peer, Outgoing& message, Frame& frame) {
  const std::uint64_t payload =
      std::min(message.left, static_cast<std::uint64_t>(kWholeMessageBytes));
  const FrameHeader header = {.magic = kFrameMagic,
                              .from_tag = peer.self_tag,
                              .connection = peer.connection,
                              .sequence = peer.next_sequence++,
                              .channel = static_cast<std::uint8_t>(message.channel),
                              .reserved = {},
                              .message_bytes = message.bytes};
  std::memcpy(frame.bytes, &header, sizeof(header));
  std::size_t filled = sizeof(header);
  std::size_t num_iov = 1;
  const bool gather = sizeof(header) + payload <= kGatherBytes;
  for (std::uint64_t left = payload; left > 0;) {
    const absl::Span<const std::byte> span = message.spans[message.next_span];
    const std::size_t n = std::min<std::uint64_t>(left, span.size() - message.next_offset);
    const std::byte* const from = span.data() + message.next_offset;
    if (gather) {
      std::memcpy(frame.bytes + filled, from, n);
      filled += n;
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

  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &OnFrameSent;
  param.user_data = &frame;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (gather) {
    return ucp_am_send_nbx(peer.endpoint, kAmId, nullptr, 0, frame.bytes, filled, &param);
  }
  frame.iov[0] = {frame.bytes, sizeof(header)};
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
  param.datatype = ucp_dt_make_iov();
  return ucp_am_send_nbx(peer.endpoint, kAmId, nullptr, 0, frame.iov.data(), num_iov, &param);
}

void UcxFabric::OnFrameSent(void* request, ucs_status_t status, void* arg) {
  Frame& frame = *static_cast<Frame*>(arg);
  ucp_request_free(request);
  frame.message->peer->fabric->FrameEnded(frame, status);
}

void UcxFabric::FrameEnded(Frame& frame, ucs_status_t status) {
  Outgoing& message = *frame.message;
  frames_.Put(&frame);
  ++events_;
  --message.frames_in_flight;
  --message.peer->frames_in_flight;
  if (status != UCS_OK && message.status.ok()) {
    message.status = UcxError("send", status);
  }
  if (message.all_sent && message.frames_in_flight == 0 && !closing_) Finish(message);
}

void UcxFabric::Finish(Outgoing& message) {
  const Done done = std::exchange(message.done, nullptr);
  const absl::Status status = std::exchange(message.status, absl::OkStatus());
  messages_.Put(&message);
  if (done) done(status);
}

// --- Receiving -----------------------------------------------------------------------------

ucs_status_t UcxFabric::OnFrame(void* self, const void* /*header*/, std::size_t /*header_bytes*/,
                                void* data, std::size_t bytes, const ucp_am_recv_param_t* param) {
  auto& fabric = *static_cast<UcxFabric*>(self);
  ++fabric.events_;
  if (fabric.closing_) return UCS_OK;
  // A rendezvous request: nobody of ours makes one.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
  fabric.assembler_.Accept(absl::MakeConstSpan(static_cast<const std::byte*>(data), bytes));
  return UCS_OK;
}

void UcxFabric::OnMessage(const FrameHeader& header, absl::Span<const std::byte> payload) {
  if (std::find(self_connections_.begin(), self_connections_.end(), header.connection) ==
      self_connections_.end()) {
    counters_.received_bytes += payload.size();
    ++counters_.received_messages;
  }
  const Handler& handler = handlers_[header.channel];
  if (handler) handler(header.from_tag, payload);
}

// --- Progress and death --------------------------------------------------------------------

bool UcxFabric::Progress() {
  const std::uint64_t before = events_;
  while (ucp_worker_progress(worker_.get()) != 0) {
  }
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer->head != nullptr) Pump(*peer);
  }
  if (any_failure_) BuryTheDead();
  return events_ != before;
}

void UcxFabric::OnPeerFailure(void* arg, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  // The endpoint must not be closed from within this callback: BuryTheDead() does.
  Peer& peer = *static_cast<Peer*>(arg);
  if (peer.failure == UCS_OK) peer.failure = status;
  peer.fabric->any_failure_ = true;
}

void UcxFabric::BuryTheDead() {
  any_failure_ = false;
  for (const std::unique_ptr<Peer>& owned : peers_) {
    Peer& peer = *owned;
    if (peer.failure == UCS_OK || !peer.status.ok()) continue;
    ++events_;
    peer.status = UcxError("lost the peer", peer.failure);
    Close(peer);
    for (Outgoing* message = std::exchange(peer.head, nullptr); message != nullptr;) {
      Outgoing* const next = message->next;
      message->status = peer.status;
      message->all_sent = true;
      if (message->frames_in_flight == 0) Finish(*message);
      message = next;
    }
    peer.tail = nullptr;
  }
}

void UcxFabric::Close(Peer& peer) {
  if (peer.endpoint == nullptr) return;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = [](void* request, ucs_status_t, void*) { ucp_request_free(request); };
  ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
}

bool UcxFabric::SendsInFlight() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return peer->frames_in_flight > 0; });
}

// --- Waiting -------------------------------------------------------------------------------

void UcxFabric::Wait(absl::Duration timeout) {
  const Clock::time_point start = Clock::now();
  const auto limit = absl::ToChronoNanoseconds(std::min(timeout, kLongestSleep));
  for (int i = 0; i < kSpins; ++i) {
    if (Progress() || woken_.exchange(false)) return;
    SpinPause();
  }
  std::chrono::nanoseconds waited{};
  while ((waited = Clock::now() - start) < std::min<std::chrono::nanoseconds>(limit, kYieldFor)) {
    if (Progress() || woken_.exchange(false)) return;
    sched_yield();
  }
  if (waited < limit) Sleep(limit - waited);
  woken_.store(false);
  Progress();
}

void UcxFabric::Sleep(std::chrono::nanoseconds limit) {
  sleeping_.store(true);
  // After this, Wake() either sees that we sleep or we see that it was called.
  if (!woken_.load() && ucp_worker_arm(worker_.get()) == UCS_OK) {
    // Room in a peer's queue raises no event.
    if (SendsInFlight()) limit = std::min<std::chrono::nanoseconds>(limit, kFullQueueNap);
    pollfd events = {.fd = event_fd_, .events = POLLIN, .revents = 0};
    const timespec timeout = {.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000),
                              .tv_nsec = static_cast<long>(limit.count() % 1'000'000'000)};
    ppoll(&events, 1, &timeout, nullptr);
  }
  sleeping_.store(false);
}

void UcxFabric::Wake() {
  woken_.store(true);
  if (sleeping_.load()) ucp_worker_signal(worker_.get());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Fabric>> MakeUcxFabric() { return UcxFabric::Make(); }

}  // namespace weft
