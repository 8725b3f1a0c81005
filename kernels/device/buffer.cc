#include "kernels/device/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "fmt/format.h"
#include "kernels/device/device_stream.h"
#include "server/base/mutex.h"
#include "server/base/status_macros.h"

namespace weft::kernels {

// Memory in whole huge pages, given back when the last buffer in it is gone. Most weights of a
// small model are smaller than a huge page: many of them share a slab, each byte of which is given
// out once and hence still zero.
class Buffer::Slab {
 public:
  // Null when the memory cannot be had.
  static std::shared_ptr<Slab> Map(std::int64_t bytes) {
    const std::int64_t mapped = bytes + kHugePageBytes;
    void* memory = mmap(nullptr, static_cast<std::size_t>(mapped), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    auto slab = std::make_shared<Slab>();
    slab->memory_ = static_cast<std::byte*>(memory);
    slab->mapped_bytes_ = mapped;
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    slab->used_bytes_ = static_cast<std::int64_t>(-address % kHugePageBytes);
    madvise(memory, static_cast<std::size_t>(mapped), MADV_HUGEPAGE);
    return slab;
  }

  Slab() = default;
  ~Slab() { munmap(memory_, static_cast<std::size_t>(mapped_bytes_)); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::int64_t free_bytes() const { return mapped_bytes_ - used_bytes_; }

  std::byte* Take(std::int64_t bytes) {
    std::byte* data = memory_ + used_bytes_;
    used_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return data;
  }

  static constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
  static constexpr std::int64_t kSharedBytes = std::int64_t{32} << 20;

 private:
  static constexpr std::int64_t kAlignment = 64;

  std::byte* memory_ = nullptr;
  std::int64_t mapped_bytes_ = 0;
  std::int64_t used_bytes_ = 0;
};

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

absl::StatusOr<Buffer> Buffer::Allocate(std::int64_t bytes) {
  static Mutex mutex;
  static std::weak_ptr<Slab> shared;  // the slab that small buffers come from
  Buffer buffer;
  if (bytes == 0) return buffer;
  const bool shares = bytes < Slab::kSharedBytes / 4;
  MutexLock lock(mutex);
  std::shared_ptr<Slab> slab;
  if (shares) slab = shared.lock();
  if (slab == nullptr || slab->free_bytes() < bytes) {
    slab = Slab::Map(shares ? Slab::kSharedBytes : bytes);
    if (shares) shared = slab;
  }
  if (slab == nullptr) {
    return absl::ResourceExhaustedError(fmt::format("cannot allocate {} bytes", bytes));
  }
  buffer.data_ = slab->Take(bytes);
  buffer.size_bytes_ = bytes;
  buffer.owner_ = std::move(slab);
  return buffer;
}

absl::StatusOr<Buffer> Buffer::Allocate(std::int64_t bytes, Stream& stream) {
  DeviceStream* const device = OnDevice(stream);
  if (device == nullptr || bytes == 0) return Allocate(bytes);
  ASSIGN_OR_RETURN(void* data, device->Allocate(bytes));
  return Of(std::shared_ptr<void>(data, [device](void* memory) { device->Free(memory); }), bytes);
}

Buffer Buffer::Of(std::shared_ptr<void> owner, std::int64_t bytes) {
  Buffer buffer;
  buffer.data_ = static_cast<std::byte*>(owner.get());
  buffer.size_bytes_ = bytes;
  buffer.owner_ = std::move(owner);
  return buffer;
}

}  // namespace weft::kernels
