#pragma once

#include <cstdint>

#include "kernels/linear.h"

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

// y = silu(gate + bias) * (up + bias) for rows [row, row + num_rows) of a gated weight's panels
// `panel` and `panel` + 1; their sums are [num_rows, 16], the second's `sums_stride` floats behind.
void StoreGated(const LinearParams& params, std::int64_t row, std::int64_t num_rows,
                std::int64_t panel, const float* sums, std::int64_t sums_stride);

}  // namespace weft::kernels
