#pragma once

#include <cstdint>

#include "kernels/cpu/linear_piece.h"
#include "kernels/linear.h"

namespace weft::kernels {

inline constexpr std::int64_t kDotRows = 72;  // at most, of a piece

// Whether DotLinearTask() is for weights of `format`, on a CPU that HasDotProducts()
// (device/cpu_target.h).
constexpr bool IsForDots(WeightFormat format) {
  return format == WeightFormat::kBFloat16 || format == WeightFormat::kInt8 ||
         format == WeightFormat::kInt4;
}

// A piece of a product by instructions that multiply pairs:
//   bfloat16:    x is rounded to bfloat16, to nearest even, what is below the normal numbers to
//                zero; one fp32 chain of pairs an output
//   int8, int4:  x is rounded to 16-bit integers, in each of the weights' groups with a scale of
//                its own, the group's largest / 32767; integer sums of a group are exact, and one
//                fp32 chain of groups an output
// `launch`: a number of its own for each product, or group of them, not 0: x must not change under
// it.
void DotLinearTask(const LinearParams& params, const LinearPiece& piece, std::uint64_t launch);

}  // namespace weft::kernels
