#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weft::kernels {

class Stream;

// Memory of the host or of a device, 64-byte aligned; the host's is zeroed, in huge pages where the
// kernel gives them. Movable. Small buffers share mappings: meant for what lives long (weights, KV,
// workspaces), not for what comes and goes with a request. Allocation and destruction may happen on
// any thread.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;

  // RESOURCE_EXHAUSTED when the memory cannot be had; the message has the size.
  static absl::StatusOr<Buffer> Allocate(std::int64_t bytes);
  // Where the kernels of `stream` read and write, which must outlive it.
  static absl::StatusOr<Buffer> Allocate(std::int64_t bytes, Stream& stream);

  // Of memory that somebody else has allocated, and `owner` gives back.
  static Buffer Of(std::shared_ptr<void> owner, std::int64_t bytes);

  std::byte* data() const { return data_; }
  std::int64_t size_bytes() const { return size_bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  class Slab;
  std::shared_ptr<void> owner_;  // null if nothing was allocated
  std::byte* data_ = nullptr;
  std::int64_t size_bytes_ = 0;
};

}  // namespace weft::kernels
