#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weft::kernels {

// Memory of a device, 64-byte aligned, zeroed, in huge pages where the kernel gives them. Movable.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;

  // RESOURCE_EXHAUSTED when the memory cannot be had; the message has the size.
  static absl::StatusOr<Buffer> Allocate(std::int64_t bytes);

  std::byte* data() const { return data_; }
  std::int64_t size_bytes() const { return size_bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  std::int64_t size_bytes_ = 0;
};

}  // namespace weft::kernels
