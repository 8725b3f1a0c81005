#include "worker/transfer/kv_peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "fmt/format.h"
#include "worker/group/ucx_address.h"

namespace weft {
namespace {

// The owner's key comes first.
constexpr std::size_t kKeyBytes = 64;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::StatusOr<KvMapping> Map(int descriptor, std::size_t size, int protection) {
  void* const at = mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        fmt::format("cannot map {} bytes of shared memory: {}", size, std::strerror(errno)));
  }
  return KvMapping({static_cast<std::byte*>(at), size});
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  int Release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

}  // namespace

KvMapping::~KvMapping() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

absl::StatusOr<KvStaging> KvStaging::Create(std::int64_t bytes, std::string_view fabric_address) {
  const auto size = kKeyBytes + static_cast<std::size_t>(bytes);
  Descriptor memory(memfd_create("weft-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  // Sealed: no reader meets an end that has moved.
  if (memory.get() < 0 || ftruncate(memory.get(), static_cast<off_t>(size)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ResourceExhaustedError(
        fmt::format("cannot make {} bytes of shared memory: {}", size, std::strerror(errno)));
  }
  absl::StatusOr<KvMapping> mapping = Map(memory.get(), size, PROT_READ | PROT_WRITE);
  if (!mapping.ok()) return mapping.status();
  const absl::StatusOr<FabricAddress> owner = DecodeFabricAddress(fabric_address);
  if (owner.ok()) std::memcpy(mapping->bytes().data(), &owner->key, sizeof(owner->key));
  return KvStaging(*std::move(mapping), memory.Release());
}

KvStaging::~KvStaging() {
  if (descriptor_ >= 0) close(descriptor_);
}

KvStaging::KvStaging(KvStaging&& other) noexcept
    : mapping_(std::move(other.mapping_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

absl::Span<std::byte> KvStaging::bytes() const { return mapping_.bytes().subspan(kKeyBytes); }

std::optional<KvPeerMemory> KvPeerMemory::Open(std::string_view fabric_address, int descriptor) {
  const absl::StatusOr<FabricAddress> owner = DecodeFabricAddress(fabric_address);
  if (!owner.ok()) return std::nullopt;
  const ProcessPlace own = OwnPlace();
  if (owner->place.host != own.host || owner->place.processes != own.processes) {
    return std::nullopt;
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", owner->place.pid, descriptor);
  const Descriptor memory(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info = {};
  // Sealed: only a memfd is.
  if (memory.get() < 0 || fcntl(memory.get(), F_GET_SEALS) != kSeals ||
      fstat(memory.get(), &info) != 0 || info.st_size < static_cast<off_t>(kKeyBytes)) {
    return std::nullopt;
  }
  absl::StatusOr<KvMapping> mapping =
      Map(memory.get(), static_cast<std::size_t>(info.st_size), PROT_READ);
  if (!mapping.ok() || std::memcmp(mapping->bytes().data(), &owner->key, sizeof(owner->key)) != 0) {
    return std::nullopt;
  }
  return KvPeerMemory(*std::move(mapping));
}

absl::Span<const std::byte> KvPeerMemory::bytes() const {
  return mapping_.bytes().subspan(kKeyBytes);
}

void FenceKvMemory() {
#ifndef __SANITIZE_THREAD__  // gcc's refuses fences; the other side is another process
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace weft
