#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"

// kernels/lse_merge.h and kernels/head_exchange.h on a GPU, for values T on the wire; LSEs are
// fp32.

namespace weft::kernels::cuda {

// As kernels::LseMerge(), out of parts that are padded as collectives carry them.
template <typename T>
struct LseMergeParams {
  const T* parts;    // part p: part_stride values from the one before, [num_rows, padded_heads,
                     // head_dim], of which the first num_heads count
  const float* lse;  // part p: lse_stride floats from the one before, [num_rows, padded_heads]
  std::int64_t part_stride;
  std::int64_t lse_stride;
  T* out;             // [num_rows, num_heads, head_dim]
  float* merged_lse;  // [num_rows, num_heads], or null
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t padded_heads;
  std::int32_t head_dim;
};

template <typename T>
absl::Status LseMerge(const LseMergeParams<T>& params, CudaStream& stream);

// As kernels::LseScale().
template <typename T>
struct LseScaleParams {
  T* out;            // [num_rows, num_heads, head_dim], in place
  const float* lse;  // [num_parts, num_rows, num_heads] of every part
  std::int32_t num_parts;
  std::int32_t part;  // whose weight to apply
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
};

template <typename T>
absl::Status LseScale(const LseScaleParams<T>& params, CudaStream& stream);

// As kernels/head_exchange.h says; part_begin is in the device's memory.
struct HeadExchangeParams {
  const std::int32_t* part_begin;  // [num_parts + 1]
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t padded_heads;
  std::int32_t head_dim;
  std::int64_t part_stride;  // values from part to part of `parts`
};

template <typename T>
absl::Status UnpackHeads(const HeadExchangeParams& params, const T* parts, T* heads,
                         CudaStream& stream);
template <typename T>
absl::Status PackHeads(const HeadExchangeParams& params, const T* heads, float padding, T* parts,
                       CudaStream& stream);

}  // namespace weft::kernels::cuda
