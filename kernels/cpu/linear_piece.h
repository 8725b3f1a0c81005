#pragma once

#include <cstdint>

namespace weft::kernels {

// Up to here a product waits for its weights, which stream from memory one panel after the other.
constexpr std::int64_t kStreamedRows = 12;

// What one task of a product computes.
struct LinearPiece {
  std::int64_t first_row;
  std::int64_t end_row;
  std::int64_t first_panel;
  std::int64_t end_panel;
};

}  // namespace weft::kernels
