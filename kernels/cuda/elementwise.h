#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"
#include "kernels/device/device_limits.h"

// kernels/elementwise.h on a GPU, for activations T: float, BFloat16 or Float16. Asynchronous.

namespace weft::kernels::cuda {

// sum = x + residual, out = weight * sum / sqrt(mean(sum^2) + eps), per `size` values; the norm is
// that of the sum as it is stored. INVALID_ARGUMENT if `size` is over kMaxDeviceNormSize.
template <typename T>
struct RmsNormParams {
  const T* x;           // [num_rows, num_heads, size], row_stride values from row to row
  const T* residual;    // as x; or null: sum is x
  const float* weight;  // [size]
  T* sum;               // as x, or null; may be x or residual
  T* out;               // as x; may be x, not sum
  std::int32_t num_rows;
  std::int32_t size;
  float eps;
  std::int32_t num_heads = 1;   // normed apart, with the same weight
  std::int64_t row_stride = 0;  // 0: num_heads * size
};

template <typename T>
absl::Status RmsNorm(const RmsNormParams<T>& params, CudaStream& stream);

// Rotates pairs (i, i + head_dim / 2), each head normed before with `weight` if there is one.
template <typename T>
struct RopeParams {
  T* x;              // [num_rows, num_heads, head_dim], with strides
  const float* cos;  // [num_rows, head_dim / 2]
  const float* sin;  // [num_rows, head_dim / 2]
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;  // even, at most kMaxDeviceRopeDim
  std::int64_t row_stride;
  std::int64_t head_stride = 0;  // 0: head_dim
  // Where the result goes instead of x.
  T* out = nullptr;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  const float* norm_weight = nullptr;  // [head_dim], or null
  float eps = 0.0F;
};

template <typename T>
absl::Status Rope(const RopeParams<T>& params, CudaStream& stream);

// out[:, j] = silu(gate_up[:, j]) * gate_up[:, size + j].
template <typename T>
struct SiluMulParams {
  const T* gate_up;  // [num_rows, 2 * size]
  T* out;            // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t size;
};

template <typename T>
absl::Status SiluMul(const SiluMulParams<T>& params, CudaStream& stream);

// out[i] = in[index[i]], rows of `size` values.
template <typename T>
struct GatherRowsParams {
  const T* in;                // [any, size]
  const std::int32_t* index;  // [num_rows]
  T* out;                     // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t size;
};

template <typename T>
absl::Status GatherRows(const GatherRowsParams<T>& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
