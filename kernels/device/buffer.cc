#include "kernels/device/buffer.h"

#include <sys/mman.h>

#include "fmt/format.h"

namespace weft::kernels {
namespace {

constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;

}  // namespace

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(size_bytes_));
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

absl::StatusOr<Buffer> Buffer::Allocate(std::int64_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(fmt::format("cannot allocate {} bytes", bytes));
  }
  if (bytes >= kHugePageBytes) madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  buffer.data_ = static_cast<std::byte*>(data);
  buffer.size_bytes_ = bytes;
  return buffer;
}

}  // namespace weft::kernels
