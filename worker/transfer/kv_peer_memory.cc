#include "worker/transfer/kv_peer_memory.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <utility>

#include "worker/group/ucx_address.h"

namespace weft {

std::optional<KvPeerMemory> KvPeerMemory::Open(std::string_view fabric_address) {
  const absl::StatusOr<FabricAddress> address = DecodeFabricAddress(fabric_address);
  if (!address.ok()) return std::nullopt;
  const ProcessPlace own = OwnPlace();
  if (address->place.host != own.host || address->place.processes != own.processes) {
    return std::nullopt;
  }
  // glibc's pidfd_open() is declared without extern "C".
  const long descriptor = syscall(SYS_pidfd_open, static_cast<pid_t>(address->place.pid), 0);
  if (descriptor < 0) return std::nullopt;
  return KvPeerMemory(address->place.pid, static_cast<int>(descriptor));
}

KvPeerMemory::~KvPeerMemory() {
  if (descriptor_ >= 0) close(descriptor_);
}

KvPeerMemory::KvPeerMemory(KvPeerMemory&& other) noexcept
    : pid_(other.pid_), descriptor_(std::exchange(other.descriptor_, -1)) {}

KvPeerMemory& KvPeerMemory::operator=(KvPeerMemory&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

bool KvPeerMemory::Read(std::uint64_t address, absl::Span<std::byte> out) const {
  const iovec local = {.iov_base = out.data(), .iov_len = out.size()};
  const iovec remote = {.iov_base = reinterpret_cast<void*>(address), .iov_len = out.size()};
  const ssize_t read = process_vm_readv(static_cast<pid_t>(pid_), &local, 1, &remote, 1, 0);
  if (read != static_cast<ssize_t>(out.size())) return false;
  pollfd ended = {.fd = descriptor_, .events = POLLIN, .revents = 0};
  return poll(&ended, 1, 0) == 0;
}

}  // namespace weft
