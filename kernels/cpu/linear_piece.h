#pragma once

#include <cstdint>

namespace weft::kernels {

// What one task of a product computes.
struct LinearPiece {
  std::int64_t first_row;
  std::int64_t end_row;
  std::int64_t first_panel;
  std::int64_t end_panel;
};

}  // namespace weft::kernels
