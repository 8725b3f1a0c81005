#include <poll.h>
#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/group/fabric.h"
#include "worker/group/frame_assembler.h"
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

// Where a process can be reached. UCX uses shared memory between processes of one host and IPC
// namespace, but wakes a sleeper through an abstract Unix socket, which only processes of its
// network namespace reach (measured: such a sleeper slept on until its time was up).
struct Place {
  std::uint64_t shared_memory;  // equal: the same host and IPC namespace
  std::uint64_t network;        // equal, with the above: the same network namespace

  bool CanWake(const Place& other) const {
    return shared_memory != other.shared_memory || network == other.network;
  }
};

// The address of a fabric: this, then UCX's own.
struct AddressHeader {
  std::uint32_t magic;  // kAddressMagic
  std::uint32_t ucx_bytes;
  std::uint64_t checksum;  // of UCX's: it crashes on an address that is damaged
  Place place;
};
constexpr std::uint32_t kAddressMagic = 0x41544657;  // "WFTA"
constexpr std::size_t kMaxAddressBytes = 4096;

std::uint64_t Checksum(std::string_view bytes) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::uint64_t NamespaceId(const char* path) {
  struct stat info = {};
  return stat(path, &info) == 0 ? info.st_ino : 0;
}

Place OwnPlace() {
  std::string host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host;
  return {.shared_memory = Checksum(fmt::format("{} {}", host, NamespaceId("/proc/self/ns/ipc"))),
          .network = NamespaceId("/proc/self/ns/net")};
}

absl::StatusOr<std::string> MakeAddress(ucp_worker_h worker) {
  ucp_address_t* ucx_address = nullptr;
  std::size_t ucx_bytes = 0;
  if (ucs_status_t status = ucp_worker_get_address(worker, &ucx_address, &ucx_bytes);
      status != UCS_OK) {
    return UcxError("ucp_worker_get_address", status);
  }
  const std::string_view blob(reinterpret_cast<const char*>(ucx_address), ucx_bytes);
  const AddressHeader header = {.magic = kAddressMagic,
                                .ucx_bytes = static_cast<std::uint32_t>(ucx_bytes),
                                .checksum = Checksum(blob),
                                .place = OwnPlace()};
  std::string address(reinterpret_cast<const char*>(&header), sizeof(header));
  address += blob;
  ucp_worker_release_address(worker, ucx_address);
  if (address.size() > kMaxAddressBytes) {
    return absl::UnavailableError(
        fmt::format("UCX's address takes {} bytes, over {}: restrict UCX_NET_DEVICES",
                    address.size(), kMaxAddressBytes));
  }
  return address;
}

struct Address {
  Place place;
  std::string_view ucx;
};

absl::StatusOr<Address> ParseAddress(std::string_view address) {
  AddressHeader header;
  if (address.size() < sizeof(header) || address.size() > kMaxAddressBytes) {
    return absl::InvalidArgumentError(
        fmt::format("a fabric address of {} bytes; they have {} to {}", address.size(),
                    sizeof(header), kMaxAddressBytes));
  }
  std::memcpy(&header, address.data(), sizeof(header));
  const std::string_view ucx = address.substr(sizeof(header));
  if (header.magic != kAddressMagic || header.ucx_bytes != ucx.size() ||
      header.checksum != Checksum(ucx)) {
    return absl::InvalidArgumentError("not the address of a UCX fabric, or a damaged one");
  }
  return Address{.place = header.place, .ucx = ucx};
}

class UcxFabric final : public Fabric, public FrameAssembler::Sink {
 public:
  UcxFabric(UcpContext context, UcpWorker worker, std::string address)
      : context_(std::move(context)),
        worker_(std::move(worker)),
        address_(std::move(address)),
        assembler_(*this) {}

  ~UcxFabric() override {
    state_.closing = true;
    for (const std::unique_ptr<UcxPeer>& peer : peers_) peer->Close();
    // Lets UCX give up what the closed endpoints still had.
    for (int i = 0; i < 1000 && AnyBusy(); ++i) ucp_worker_progress(worker_.get());
    worker_.reset();  // while what its callbacks use is still there
  }

  // Second part of MakeUcxFabric(): callbacks need the fabric's address.
  absl::Status Start();

  std::string LocalAddress() const override { return address_; }

  absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t self_tag) override {
    ASSIGN_OR_RETURN(const Address parsed, ParseAddress(address));
    ASSIGN_OR_RETURN(std::unique_ptr<UcxPeer> peer,
                     UcxPeer::Connect(worker_.get(), parsed.ucx, self_tag, state_));
    if (!parsed.place.CanWake(OwnPlace())) deaf_ = true;
    if (address == address_) self_connections_.push_back(peer->connection());
    peers_.push_back(std::move(peer));
    return PeerId{static_cast<std::uint32_t>(peers_.size() - 1)};
  }

  void Receive(Channel channel, Handler handler) override {
    Handler& slot = handlers_[static_cast<std::size_t>(channel)];
    CHECK_MSG(slot == nullptr, "a channel has one handler");
    slot = std::move(handler);
  }

  absl::Status Send(PeerId peer, Channel channel,
                    absl::Span<const absl::Span<const std::byte>> spans, Done done) override;
  absl::Status PeerStatus(PeerId peer) const override { return At(peer).status(); }
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
    CHECK_MSG(index < peers_.size(), "a PeerId comes from Connect()");
    return *peers_[index];
  }
  bool IsSelf(std::uint64_t connection) const {
    return std::find(self_connections_.begin(), self_connections_.end(), connection) !=
           self_connections_.end();
  }
  bool AnyBusy() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& p) { return p->busy(); });
  }
  void Sleep(std::chrono::nanoseconds limit);

  // Destroyed last to first: the worker before its context, both after what callbacks use.
  UcxSendState state_;
  UcpContext context_;
  UcpWorker worker_;
  const std::string address_;
  int event_fd_ = -1;  // the worker's
  FrameAssembler assembler_;
  std::vector<std::unique_ptr<UcxPeer>> peers_;
  std::vector<std::uint64_t> self_connections_;
  std::array<Handler, kNumChannels> handlers_;
  FabricCounters counters_;
  bool deaf_ = false;  // some peer cannot wake us
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
  // By index: completions may connect.
  for (std::size_t i = 0; i < peers_.size(); ++i) peers_[i]->Pump();
  if (state_.any_failure) {
    state_.any_failure = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) peers_[i]->BuryIfDead();
  }
  return state_.events != before;
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
  // After this, either Wake() sees that we sleep or we see that it was called.
  if (!woken_.load() && ucp_worker_arm(worker_.get()) == UCS_OK) {
    if (deaf_) limit = std::min<std::chrono::nanoseconds>(limit, kDeafNap);
    if (AnyBusy()) limit = std::min<std::chrono::nanoseconds>(limit, kFullQueueNap);
    pollfd events = {.fd = event_fd_, .events = POLLIN, .revents = 0};
    const timespec timeout = {.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000),
                              .tv_nsec = static_cast<long>(limit.count() % 1'000'000'000)};
    ppoll(&events, 1, &timeout, nullptr);
  }
  sleeping_.store(false);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Fabric>> MakeUcxFabric() {
  ASSIGN_OR_RETURN(UcpContext context, MakeUcpContext());
  ASSIGN_OR_RETURN(UcpWorker worker, MakeUcpWorker(context.get()));
  ASSIGN_OR_RETURN(std::string address, MakeAddress(worker.get()));
  auto fabric =
      std::make_unique<UcxFabric>(std::move(context), std::move(worker), std::move(address));
  RETURN_IF_ERROR(fabric->Start());
  return fabric;
}

}  // namespace weft
