#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

namespace weft::kernels {

// out = weight * x / sqrt(mean(x^2) + eps), per `size` floats.
struct RmsNormParams {
  const float* x;       // [num_rows, num_heads, size], row_stride floats from row to row
  const float* weight;  // [size]
  float* out;           // as x; may be x
  std::int32_t num_rows;
  std::int32_t size;
  float eps;
  std::int32_t num_heads = 1;   // normed apart, with the same weight
  std::int64_t row_stride = 0;  // 0: num_heads * size
};

absl::Status RmsNorm(const RmsNormParams& params, Stream& stream);

// Rotates pairs (i, i + head_dim / 2) ("rotate_half"): a' = a cos - b sin, b' = b cos + a sin.
struct RopeParams {
  float* x;          // [num_rows, num_heads, head_dim], in place; row_stride floats from row to row
  const float* cos;  // [num_rows, head_dim / 2]
  const float* sin;  // [num_rows, head_dim / 2]
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
  std::int64_t row_stride;
  std::int64_t head_stride = 0;  // floats from head to head; 0: head_dim
  // Where the result goes instead of x, with strides of its own.
  float* out = nullptr;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
};

absl::Status Rope(const RopeParams& params, Stream& stream);

// out[:, j] = silu(gate_up[:, j]) * gate_up[:, size + j], silu(x) = x / (1 + exp(-x)).
struct SiluMulParams {
  const float* gate_up;  // [num_rows, 2 * size]
  float* out;            // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t size;
};

absl::Status SiluMul(const SiluMulParams& params, Stream& stream);

// out[i] = in[index[i]], rows of `size` floats.
struct GatherRowsParams {
  const float* in;            // [any, size]
  const std::int32_t* index;  // [num_rows]
  float* out;                 // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t size;
};

absl::Status GatherRows(const GatherRowsParams& params, Stream& stream);

}  // namespace weft::kernels
