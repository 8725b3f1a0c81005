#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/draw.h"
#include "server/base/status_macros.h"
#include "worker/group/fabric.h"
#include "worker/group/frame_assembler.h"
#include "worker/group/ucx_address.h"
#include "worker/group/ucx_context.h"
#include "worker/group/ucx_peer.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

// How Wait() passes its time. A yield costs under a microsecond when nobody else wants the core,
// and when somebody does, it is often the very rank we wait for: with 200 spins (20 us) before the
// first yield, every collective on a busy machine took 20 us; with 16 it took 6. Sleeping costs
// the sender a system call and us the way through the scheduler, 5-50 us.
constexpr int kSpins = 16;
constexpr auto kYieldFor = std::chrono::microseconds(300);
// UCX looks after its peers only when it is called.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(500);
// Room in a peer's queue raises no event.
constexpr auto kFullQueueNap = std::chrono::microseconds(200);
// How long we sleep while a peer cannot wake us.
constexpr auto kDeafNap = std::chrono::milliseconds(1);

// What Progress() does at most, so that a peer that never stops sending cannot keep us there.
constexpr int kMaxProgress = 256;

inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

absl::StatusOr<std::string> MakeAddress(ucp_worker_h worker, std::uint64_t key) {
  ucp_address_t* ucx_address = nullptr;
  std::size_t ucx_bytes = 0;
  if (ucs_status_t status = ucp_worker_get_address(worker, &ucx_address, &ucx_bytes);
      status != UCS_OK) {
    return UcxError("ucp_worker_get_address", status);
  }
  std::string address =
      EncodeFabricAddress({.place = OwnPlace(),
                           .ucx = {reinterpret_cast<const char*>(ucx_address), ucx_bytes},
                           .key = key});
  ucp_worker_release_address(worker, ucx_address);
  if (absl::Status status = DecodeFabricAddress(address).status(); !status.ok()) {
    return absl::UnavailableError(
        fmt::format("UCX's address takes {} bytes: restrict UCX_NET_DEVICES", ucx_bytes));
  }
  return address;
}

class UcxFabric final : public Fabric, public FrameAssembler::Sink {
 public:
  UcxFabric(UcpContext context, UcpWorker worker, std::string address, std::uint64_t key,
            std::int64_t frame_bytes)
      : state_(frame_bytes),
        context_(std::move(context)),
        worker_(std::move(worker)),
        address_(std::move(address)),
        assembler_(*this, key, frame_bytes) {}

  ~UcxFabric() override {
    state_.closing = true;
    for (const std::unique_ptr<UcxPeer>& peer : peers_) {
      if (peer != nullptr) peer->Close();
    }
    // Lets UCX give up what the closed endpoints still had.
    for (int i = 0; i < 1000 && AnyBusy(); ++i) ucp_worker_progress(worker_.get());
    worker_.reset();  // while what its callbacks use is still there
    for (std::size_t i = 1; i < descriptors_.size(); ++i) close(descriptors_[i].fd);
  }

  // Second part of MakeUcxFabric(): callbacks need the fabric's address.
  absl::Status Start();

  std::string LocalAddress() const override { return address_; }

  absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t self_tag) override {
    ASSIGN_OR_RETURN(const FabricAddress parsed, DecodeFabricAddress(address));
    ASSIGN_OR_RETURN(std::unique_ptr<UcxPeer> peer,
                     UcxPeer::Connect(worker_.get(), parsed.ucx, parsed.key, self_tag, state_));
    if (!CanWake(parsed.place, OwnPlace())) deaf_ = true;
    if (const int process = WatchProcess(parsed.place); process >= 0) {
      descriptors_.push_back({.fd = process, .events = POLLIN, .revents = 0});
      watched_.push_back(peer.get());
    }
    if (address == address_) self_connections_.push_back(peer->connection());
    if (free_ids_.empty()) {
      free_ids_.push_back(peers_.size());
      peers_.emplace_back();
    }
    const std::size_t id = free_ids_.back();
    free_ids_.pop_back();
    peers_[id] = std::move(peer);
    return PeerId{static_cast<std::uint32_t>(id)};
  }

  void Receive(Channel channel, Handler handler) override {
    Handler& slot = handlers_[static_cast<std::size_t>(channel)];
    CHECK_MSG(slot == nullptr, "a channel has one handler");
    slot = std::move(handler);
  }

  absl::Status Send(PeerId peer, Channel channel,
                    absl::Span<const absl::Span<const std::byte>> spans, Done done) override;
  absl::Status PeerStatus(PeerId peer) const override { return At(peer).status(); }
  void Disconnect(PeerId peer) override;
  bool Progress() override;
  void Wait(absl::Duration timeout) override;

  void Wake() override {
    woken_.store(true);
    if (sleeping_.load()) ucp_worker_signal(worker_.get());
  }

  FabricCounters Counters() const override { return counters_; }

  void OnMessage(const FrameHeader& header, absl::Span<const std::byte> payload) override {
    if (!IsSelf(header.connection)) {
      counters_.received_bytes += payload.size();
      ++counters_.received_messages;
    }
    const Handler& handler = handlers_[header.channel];
    if (handler) handler(header.from_tag, payload);
  }

 private:
  static ucs_status_t OnFrame(void* self, const void* header, std::size_t header_bytes, void* data,
                              std::size_t bytes, const ucp_am_recv_param_t* param);

  UcxPeer& At(PeerId peer) const {
    const auto index = static_cast<std::size_t>(peer);
    CHECK_MSG(index < peers_.size() && peers_[index] != nullptr, "a PeerId comes from Connect()");
    return *peers_[index];
  }
  bool IsSelf(std::uint64_t connection) const {
    return std::find(self_connections_.begin(), self_connections_.end(), connection) !=
           self_connections_.end();
  }
  bool AnyBusy() const {
    const auto busy = [](const auto& peer) { return peer != nullptr && peer->busy(); };
    return std::any_of(peers_.begin(), peers_.end(), busy) ||
           std::any_of(leaving_.begin(), leaving_.end(), busy);
  }
  void Unwatch(std::size_t index);
  void Sleep(std::chrono::nanoseconds limit);
  // Waits for an event and fails the peers whose process is gone.
  void Poll(std::chrono::nanoseconds limit);

  // Destroyed last to first: the worker before its context, both after what callbacks use.
  UcxSendState state_;
  UcpContext context_;
  UcpWorker worker_;
  const std::string address_;
  // What Sleep() polls: the worker's event descriptor, then one per entry of watched_. UCX's own
  // check of processes is the second signal: it takes a second, takes a zombie for alive, and
  // missed about 1 of 100 peers killed in the middle of large sends.
  std::vector<pollfd> descriptors_;
  std::vector<UcxPeer*> watched_;
  FrameAssembler assembler_;
  std::vector<std::unique_ptr<UcxPeer>> peers_;    // by id
  std::vector<std::size_t> free_ids_;              // of peers_, null
  std::vector<std::unique_ptr<UcxPeer>> leaving_;  // disconnected, and known to UCX yet
  std::vector<std::uint64_t> self_connections_;
  std::array<Handler, kNumChannels> handlers_;
  FabricCounters counters_;
  bool deaf_ = false;  // some peer cannot wake us
  std::atomic<bool> woken_{false};
  std::atomic<bool> sleeping_{false};
};

absl::Status UcxFabric::Start() {
  int events = -1;
  if (ucs_status_t status = ucp_worker_get_efd(worker_.get(), &events); status != UCS_OK) {
    return UcxError("ucp_worker_get_efd", status);
  }
  descriptors_.push_back({.fd = events, .events = POLLIN, .revents = 0});
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kUcxFrameId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &OnFrame;
  handler.arg = this;
  if (ucs_status_t status = ucp_worker_set_am_recv_handler(worker_.get(), &handler);
      status != UCS_OK) {
    return UcxError("ucp_worker_set_am_recv_handler", status);
  }
  return absl::OkStatus();
}

absl::Status UcxFabric::Send(PeerId peer, Channel channel,
                             absl::Span<const absl::Span<const std::byte>> spans, Done done) {
  std::uint64_t bytes = 0;
  for (const absl::Span<const std::byte> span : spans) bytes += span.size();
  if (spans.empty() || spans.size() > kMaxSpans || bytes > std::uint64_t{kMaxMessageBytes}) {
    return absl::InvalidArgumentError(
        fmt::format("a message of {} bytes in {} spans; allowed are {} bytes in 1 to {} spans",
                    bytes, spans.size(), kMaxMessageBytes, kMaxSpans));
  }
  UcxPeer& to = At(peer);
  if (!IsSelf(to.connection())) {
    counters_.sent_bytes += bytes;
    ++counters_.sent_messages;
  }
  to.Send(channel, spans, bytes, std::move(done));
  return absl::OkStatus();
}

ucs_status_t UcxFabric::OnFrame(void* self, const void* /*header*/, std::size_t /*header_bytes*/,
                                void* data, std::size_t bytes, const ucp_am_recv_param_t* param) {
  auto& fabric = *static_cast<UcxFabric*>(self);
  ++fabric.state_.events;
  // A rendezvous request has no data yet, and nobody of ours makes one.
  const bool has_data = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (has_data && !fabric.state_.closing) {
    fabric.assembler_.Accept(absl::MakeConstSpan(static_cast<const std::byte*>(data), bytes));
  }
  return UCS_OK;
}

bool UcxFabric::Progress() {
  const std::uint64_t before = state_.events;
  for (int i = 0; i < kMaxProgress && ucp_worker_progress(worker_.get()) != 0; ++i) {
  }
  // By index: completions may connect and disconnect.
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i] != nullptr) peers_[i]->Pump();
  }
  if (state_.any_failure) {
    state_.any_failure = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (peers_[i] != nullptr) peers_[i]->BuryIfDead();
    }
  }
  std::erase_if(leaving_, [](const auto& peer) { return peer->gone(); });
  return state_.events != before;
}

void UcxFabric::Disconnect(PeerId peer) {
  const UcxPeer& leaver = At(peer);
  const auto id = static_cast<std::size_t>(peer);
  CHECK_MSG(!leaver.status().ok(), "a peer that is alive stays connected");
  const auto watched = std::find(watched_.begin(), watched_.end(), &leaver);
  if (watched != watched_.end()) Unwatch(static_cast<std::size_t>(watched - watched_.begin()));
  std::erase(self_connections_, leaver.connection());
  leaving_.push_back(std::move(peers_[id]));
  free_ids_.push_back(id);
}

void UcxFabric::Unwatch(std::size_t index) {
  const auto at = static_cast<std::ptrdiff_t>(index);
  close(descriptors_[index + 1].fd);
  descriptors_.erase(descriptors_.begin() + at + 1);
  watched_.erase(watched_.begin() + at);
}

void UcxFabric::Wait(absl::Duration timeout) {
  const Clock::time_point start = Clock::now();
  const std::chrono::nanoseconds limit =
      absl::ToChronoNanoseconds(std::min(timeout, kLongestSleep));
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
  // After this, either Wake() sees that we sleep or we see that it was called. UCX does not arm
  // while it has something to do, which can be for ever: a peer that died in the middle of a send.
  if (woken_.load() || ucp_worker_arm(worker_.get()) != UCS_OK) limit = {};
  if (deaf_) limit = std::min<std::chrono::nanoseconds>(limit, kDeafNap);
  if (AnyBusy()) limit = std::min<std::chrono::nanoseconds>(limit, kFullQueueNap);
  Poll(limit);
  sleeping_.store(false);
}

void UcxFabric::Poll(std::chrono::nanoseconds limit) {
  const timespec timeout = {.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000),
                            .tv_nsec = static_cast<long>(limit.count() % 1'000'000'000)};
  if (ppoll(descriptors_.data(), descriptors_.size(), &timeout, nullptr) <= 0) return;
  for (std::size_t i = watched_.size(); i > 0; --i) {
    if (descriptors_[i].revents == 0) continue;
    watched_[i - 1]->Fail(UCS_ERR_CONNECTION_RESET);
    Unwatch(i - 1);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Fabric>> MakeUcxFabric(UcxReach reach) {
  ASSIGN_OR_RETURN(UcpContext context, MakeUcpContext(reach));
  ASSIGN_OR_RETURN(UcpWorker worker, MakeUcpWorker(context.get()));
  const std::uint64_t key = DrawUint64();
  ASSIGN_OR_RETURN(std::string address, MakeAddress(worker.get(), key));
  auto fabric = std::make_unique<UcxFabric>(
      std::move(context), std::move(worker), std::move(address), key,
      reach == UcxReach::kWithinGroup ? kWholeMessageBytes : kLongFramePayloadBytes);
  RETURN_IF_ERROR(fabric->Start());
  return fabric;
}

}  // namespace weft
