#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "kernels/cpu/convert.h"
#include "kernels/dtype.h"
#include "kernels/linear.h"

// The order of a packed weight: panels of kPanelWidth outputs, each contiguous.
//   float32, float16: [in][16]
//   bfloat16:         [ceil(in / 2)][16][2], so that a shift and a mask of one 32-bit lane give
//                     two consecutive inputs of one output
//   int8, int4:       for each group of kQuantGroup inputs 16 scales, float16, then
//                     [16][16][2] int8, pairs as bfloat16's, or
//                     [4][16] 32-bit words of 8 inputs, q + 8 each: from the lowest bits on inputs
//                     0, 2, 4, 6, 1, 3, 5, 7, so that a shift gives pairs
// Panels of a gated weight are the gate's and the up's by turns.
// Outputs past the last, and inputs past the last in its pair or group, are zero.

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

// Where in its group's int8 values input `in` of output `lane` is; where in its int4 word.
constexpr std::int64_t Int8Index(std::int32_t in, std::int32_t lane) {
  return (std::int64_t{in} / 2 * kPanelWidth + lane) * 2 + in % 2;
}
constexpr int Int4Shift(std::int32_t in) { return in % 8 / 2 * 4 + in % 2 * 16; }

inline constexpr std::int64_t kScaleBytes = 2 * kPanelWidth;  // of a group

constexpr std::int64_t GroupBytes(WeightFormat format) {
  return kScaleBytes + kQuantGroup * kPanelWidth / (format == WeightFormat::kInt4 ? 2 : 1);
}

constexpr std::int64_t PanelBytes(std::int32_t in_features, WeightFormat format) {
  if (const std::optional<DType> dtype = DTypeOf(format)) {
    return PanelElements(in_features, *dtype) * DTypeBytes(*dtype);
  }
  return (std::int64_t{in_features} + kQuantGroup - 1) / kQuantGroup * GroupBytes(format);
}

inline std::int64_t NumPanels(const PackedMatrix& weight) {
  const std::int64_t panels = (weight.product_features() + kPanelWidth - 1) / kPanelWidth;
  return weight.gated() ? 2 * panels : panels;
}

// One value of a panel.
inline float PanelValue(const std::byte* panel, std::int32_t in, std::int32_t lane,
                        WeightFormat format) {
  if (const std::optional<DType> dtype = DTypeOf(format)) {
    return LoadElement(panel, PanelIndex(in, lane, *dtype), *dtype);
  }
  const std::byte* group = panel + in / kQuantGroup * GroupBytes(format);
  const float scale = LoadElement(group, lane, DType::kFloat16);
  const std::byte* values = group + kScaleBytes;
  in %= kQuantGroup;
  if (format == WeightFormat::kInt8) {
    return scale * static_cast<float>(static_cast<std::int8_t>(values[Int8Index(in, lane)]));
  }
  std::uint32_t word;
  std::memcpy(&word, values + (in / 8 * kPanelWidth + lane) * sizeof(word), sizeof(word));
  return scale * static_cast<float>(static_cast<int>(word >> Int4Shift(in) & 0xf) - 8);
}

}  // namespace weft::kernels
