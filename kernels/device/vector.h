#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/buffer.h"

namespace weft::kernels {

// Floats that kernels read, made once: a norm's weights, a bias. Movable.
class Vector {
 public:
  Vector() = default;
  static absl::StatusOr<Vector> Create(absl::Span<const float> values, Stream& stream);

  // [size], null if empty: what kernels take for a bias that the model does not have.
  const float* data() const { return buffer_.as<float>(); }
  std::int64_t size() const { return size_bytes() / static_cast<std::int64_t>(sizeof(float)); }
  std::int64_t size_bytes() const { return buffer_.size_bytes(); }
  bool empty() const { return size_bytes() == 0; }

 private:
  Buffer buffer_;
};

}  // namespace weft::kernels
