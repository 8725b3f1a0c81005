#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"

// GroupedLinear() of kernels/linear.h on a GPU: products of experts with the rows that
// SortByExpert() left in the device's memory, how many each has the host does not know; and of
// heads, each with its own columns.

namespace weft::kernels::cuda {

// y = x weights[e]^T for each e, of its rows i: [expert_begin[e], expert_begin[e + 1]), or all
// max_rows where that is null. Other values of y stay as they are. All pointers are in the device's
// memory, weights[e] too; strides are in floats.
template <typename W>  // float, BFloat16 or Float16
struct GroupedLinearParams {
  const float* x;              // row r at x + r * x_stride + e * x_expert_stride; what goes into a
                               // product is rounded to W
  const std::int32_t* row_of;  // [max_rows] which row of x; null: i
  const std::int32_t* expert_begin;  // [num_experts + 1], or null
  const W* const* weights;           // [num_experts] of [out_features, in_features], in rows
  float* y;                          // row i at y + i * y_stride + e * y_expert_stride
  std::int32_t num_experts;
  std::int32_t max_rows;  // with expert_begin: that may be routed, num_rows * top_k
  std::int32_t in_features;
  std::int32_t out_features;
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int64_t x_expert_stride = 0;
  std::int64_t y_expert_stride = 0;
};

// Sums in fp32; on tensor cores for BFloat16 and Float16 where in_features is a multiple of 8, and
// x, y and their strides allow values to be read four and written two at a time. An output does not
// depend on the other rows, nor on max_rows. Allocates nothing and can be recorded.
template <typename W>
absl::Status GroupedLinear(const GroupedLinearParams<W>& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
