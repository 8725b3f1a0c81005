#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace weft {

// A fuzzer's input as a row of pieces, each with its length in front (a byte).
class FuzzInput {
 public:
  FuzzInput(const std::uint8_t* data, std::size_t size)
      : rest_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  std::uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<std::uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }
  absl::Span<const std::byte> Piece() {
    const std::size_t size = std::min<std::size_t>(Byte(), rest_.size());
    const absl::Span<const std::byte> piece = rest_.first(size);
    rest_.remove_prefix(size);
    return piece;
  }

 private:
  absl::Span<const std::byte> rest_;
};

}  // namespace weft
