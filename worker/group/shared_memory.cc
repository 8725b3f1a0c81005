#include "worker/group/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "fmt/format.h"

namespace weft {
namespace {

// The owner's key comes first.
constexpr std::size_t kKeyBytes = 64;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::StatusOr<SharedMapping> Map(int descriptor, std::size_t size, int protection) {
  void* const at = mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        fmt::format("cannot map {} bytes of shared memory: {}", size, std::strerror(errno)));
  }
  return SharedMapping({static_cast<std::byte*>(at), size});
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

SharedMapping::~SharedMapping() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

absl::StatusOr<SharedMemory> SharedMemory::Create(std::int64_t bytes, std::uint64_t key) {
  const auto size = kKeyBytes + static_cast<std::size_t>(bytes);
  Descriptor memory(memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  // Sealed: no reader meets an end that has moved.
  if (memory.get() < 0 || ftruncate(memory.get(), static_cast<off_t>(size)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ResourceExhaustedError(
        fmt::format("cannot make {} bytes of shared memory: {}", size, std::strerror(errno)));
  }
  absl::StatusOr<SharedMapping> mapping = Map(memory.get(), size, PROT_READ | PROT_WRITE);
  if (!mapping.ok()) return mapping.status();
  std::memcpy(mapping->bytes().data(), &key, sizeof(key));
  return SharedMemory(*std::move(mapping), memory.Release());
}

absl::StatusOr<SharedMemory> SharedMemory::Create(std::int64_t bytes,
                                                  std::string_view fabric_address) {
  const absl::StatusOr<FabricAddress> owner = DecodeFabricAddress(fabric_address);
  return Create(bytes, owner.ok() ? owner->key : 0);
}

SharedMemory::~SharedMemory() {
  if (descriptor_ >= 0) close(descriptor_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : mapping_(std::move(other.mapping_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

absl::Span<std::byte> SharedMemory::bytes() const { return mapping_.bytes().subspan(kKeyBytes); }

std::optional<PeerMemory> PeerMemory::Open(const ProcessPlace& owner, std::uint64_t key,
                                           int descriptor) {
  const ProcessPlace own = OwnPlace();
  if (owner.host != own.host || owner.processes != own.processes) {
    return std::nullopt;
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", owner.pid, descriptor);
  const Descriptor memory(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info = {};
  // Sealed: only a memfd is.
  if (memory.get() < 0 || fcntl(memory.get(), F_GET_SEALS) != kSeals ||
      fstat(memory.get(), &info) != 0 || info.st_size < static_cast<off_t>(kKeyBytes)) {
    return std::nullopt;
  }
  absl::StatusOr<SharedMapping> mapping =
      Map(memory.get(), static_cast<std::size_t>(info.st_size), PROT_READ);
  if (!mapping.ok() || std::memcmp(mapping->bytes().data(), &key, sizeof(key)) != 0) {
    return std::nullopt;
  }
  return PeerMemory(*std::move(mapping));
}

std::optional<PeerMemory> PeerMemory::Open(std::string_view fabric_address, int descriptor) {
  const absl::StatusOr<FabricAddress> owner = DecodeFabricAddress(fabric_address);
  if (!owner.ok()) return std::nullopt;
  return Open(owner->place, owner->key, descriptor);
}

absl::Span<const std::byte> PeerMemory::bytes() const {
  return mapping_.bytes().subspan(kKeyBytes);
}

void FenceSharedMemory() {
#ifndef __SANITIZE_THREAD__  // gcc's refuses fences; the other side is another process
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace weft
