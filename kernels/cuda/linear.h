#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"
#include "kernels/dtype.h"

// kernels/linear.h on a GPU: products by cuBLASLt, of weights [out_features, in_features] in rows.

namespace weft::kernels::cuda {

struct MatmulParams {
  const void* x;          // [num_rows, in_features] dtype, x_stride values from row to row
  const void* weight;     // [out_features, in_features] dtype
  const float* bias;      // [out_features], or null
  const float* residual;  // as y, or null; may be y
  float* y;               // [num_rows, out_features], y_stride floats from row to row
  std::int32_t num_rows;
  std::int32_t in_features;
  std::int32_t out_features;
  std::int64_t x_stride;
  std::int64_t y_stride;
  DType dtype;
};

// Products in fp32 sums, of fp32 values on CUDA cores. Which kernel is chosen depends on the shape,
// so that a row's last bits may change with num_rows. One thread, one stream.
class Matmul {
 public:
  static absl::StatusOr<std::unique_ptr<Matmul>> Create();
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // y = x W^T (+ bias) (+ residual).
  absl::Status Run(const MatmulParams& params, CudaStream& stream);

 private:
  struct Impl;
  explicit Matmul(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// out[i, :] = row ids[i] - first_row of `weight`, zeros where that is outside
// [0, num_weight_rows).
template <typename W>
struct EmbeddingParams {
  const W* weight;          // [num_weight_rows, size]
  const std::int32_t* ids;  // [num_rows]
  float* out;               // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t first_row;
  std::int32_t num_weight_rows;
  std::int32_t size;
};

template <typename W>
absl::Status Embedding(const EmbeddingParams<W>& params, CudaStream& stream);

// out = x rounded to T, between rows of different strides.
template <typename T>
struct RoundRowsParams {
  const float* x;  // [num_rows, size], x_stride floats from row to row
  T* out;          // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t size;
  std::int64_t x_stride;
};

template <typename T>
absl::Status RoundRows(const RoundRowsParams<T>& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
