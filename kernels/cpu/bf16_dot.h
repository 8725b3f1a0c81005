#pragma once

#include <cstdint>

#include "kernels/cpu/linear_piece.h"
#include "kernels/linear.h"

namespace weft::kernels {

inline constexpr std::int64_t kBf16DotRows = 48;  // at most, of a piece

// A piece of a product with bfloat16 weights, on a CPU with AVX-512 BF16 (HasBf16Dots() of
// device/cpu_target.h): x is rounded to bfloat16, to nearest even, what is below the normal numbers
// to zero; pairs of products are added to fp32 sums, one chain of them an output. `launch`: a
// number of its own for each product, or group of them, not 0: x must not change under it.
void Bf16DotTask(const LinearParams& params, const LinearPiece& piece, std::uint64_t launch);

}  // namespace weft::kernels
