#pragma once

#include <cstdint>

#include "kernels/dtype.h"

// The order of a packed weight: panels of kPanelWidth outputs, each contiguous.
//   float32, float16: [in][16]
//   bfloat16:         [ceil(in / 2)][16][2], so that a shift and a mask of one 32-bit lane give
//                     two consecutive inputs of one output
// Outputs past the last, and the input past an odd last one, are zero.

namespace weft::kernels {

inline constexpr std::int32_t kPanelWidth = 16;

constexpr std::int64_t PanelElements(std::int32_t in_features, DType dtype) {
  const std::int64_t depth =
      dtype == DType::kBFloat16 ? (std::int64_t{in_features} + 1) / 2 * 2 : in_features;
  return depth * kPanelWidth;
}

// Where in its panel input `in` of output `lane` is.
constexpr std::int64_t PanelIndex(std::int32_t in, std::int32_t lane, DType dtype) {
  if (dtype == DType::kBFloat16) {
    return (std::int64_t{in} / 2 * kPanelWidth + lane) * 2 + in % 2;
  }
  return std::int64_t{in} * kPanelWidth + lane;
}

}  // namespace weft::kernels
