#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"
#include "kernels/dtype.h"

// KvAppend() of kernels/attention.h on a GPU, with the norm and the rotation of K before it.

namespace weft::kernels::cuda {

// A block's K and V are [num_kv_heads, block_tokens_per_rank, head_dim] on a GPU, K too: whole
// tokens are what appends write and loads of tiles read.
__host__ __device__ constexpr std::int64_t KvIndex(std::int64_t block, std::int32_t kv_head,
                                                   std::int32_t token, std::int32_t num_kv_heads,
                                                   std::int32_t block_tokens_per_rank,
                                                   std::int32_t head_dim) {
  return ((block * num_kv_heads + kv_head) * block_tokens_per_rank + token) * head_dim;
}

// Writes K and V of rows into their slots, rounding to kv_dtype. In fp32 before that: the first
// norm_dim values of a head's K are normed (if there is a weight), then rope_dim values from
// rope_begin on are rotated as pairs (i, i + rope_dim / 2) (if there is a cos).
template <typename T>
struct KvAppendParams {
  const T* k;  // [num_rows, num_kv_heads, head_dim], kv_stride values from row to row
  const T* v;  // as k; null for latents
  // [num_rows] block id * block_tokens_per_rank + offset in the block; a row with a negative one
  // is not stored
  const std::int64_t* slots;
  void* k_blocks;  // [num_blocks, ...] as above, kv_dtype
  void* v_blocks;
  const float* norm_weight = nullptr;  // [norm_dim]
  const float* cos = nullptr;          // [num_rows, rope_dim / 2]
  const float* sin = nullptr;
  std::int32_t num_rows;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t block_tokens_per_rank;
  std::int64_t kv_stride;
  std::int32_t norm_dim = 0;
  std::int32_t rope_begin = 0;
  std::int32_t rope_dim = 0;  // even
  float eps = 0.0F;
  DType kv_dtype;
};

template <typename T>
absl::Status KvAppend(const KvAppendParams<T>& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
