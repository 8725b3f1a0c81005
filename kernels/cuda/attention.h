#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention.h"
#include "kernels/cuda/kv_append.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"

namespace weft::kernels::cuda {

// kernels::GqaAttention() on a GPU, of queries and outputs T, over KV as KvAppend() of
// kernels/cuda/kv_append.h stores it; all pointers are in the device's memory. `geometry` is the
// CPU's, of which `q` and `out` are not read.
template <typename T>
struct GqaAttentionParams {
  const T* q;  // [num_rows, num_q_heads, head_dim]
  T* out;      // [num_rows, num_q_heads, value_dim]
  kernels::GqaAttentionParams geometry;
  std::int32_t max_visible_len;  // no row's visible_len is larger; the launch's shape depends on it
};

// `workspace`: GqaAttentionWorkspaceBytes() bytes. INVALID_ARGUMENT for a head_dim or value_dim
// that the CPU refuses, too, and for a T that goes with other kv_dtypes (kBFloat16 and kFloat16
// with itself, float with all).
//
// On CUDA cores, in any dims: as on the CPU, a row's result does not depend on the other rows;
// every 512 keys make a part, and parts merge in order, whether one block computes them or many.
// Entries that no row sees are never read.
//
// On tensor cores, where KV is in kBFloat16 or kFloat16 and head_dim is 64 or 128, or 576 with a
// value_dim of 512: queries and softmax weights are rounded to kv_dtype, sums are fp32. A row's
// last bits may change with the lengths of the batch, of which depends how its keys are split.
// Entries that no row of a sequence sees are not read; what one row sees has to be finite for the
// others.
template <typename T>
absl::Status GqaAttention(const GqaAttentionParams<T>& params, void* workspace, CudaStream& stream);

// For any batch with this many heads, dims and at most this many visible entries.
std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                        std::int32_t value_dim, std::int32_t max_visible_len);

}  // namespace weft::kernels::cuda
