#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

// Merging attention over disjoint sets of keys: with m = max_r lse_r and
// w_r = exp(lse_r - m) / sum_r exp(lse_r - m), out = sum_r w_r out_r. All lse -inf: out = 0,
// lse = -inf. A weight of 0 contributes exactly 0, whatever out_r holds. Natural logarithm, fp32,
// summed in part order (bitwise stable run to run).

namespace weft::kernels {

// Scales one rank's partial output by its weight, for a sum over ranks elsewhere (reduce-scatter).
struct LseScaleParams {
  float* out;        // [num_rows, num_heads, head_dim], in place
  const float* lse;  // [num_parts, num_rows, num_heads] of every part
  std::int32_t num_parts;
  std::int32_t part;  // whose weight to apply
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
};

absl::Status LseScale(const LseScaleParams& params, Stream& stream);

// Merges parts that are all here (after an all-to-all).
struct LseMergeParams {
  const float*
      parts;  // part p: part_stride floats from the one before, [num_rows, num_heads, head_dim]
  const float* lse;  // part p: lse_stride floats from the one before, [num_rows, num_heads]
  std::int64_t part_stride;
  std::int64_t lse_stride;
  float* out;         // [num_rows, num_heads, head_dim]
  float* merged_lse;  // [num_rows, num_heads], or null
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
};

absl::Status LseMerge(const LseMergeParams& params, Stream& stream);

}  // namespace weft::kernels
