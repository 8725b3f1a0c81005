#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention.h"
#include "kernels/cuda/stream.h"

// What GqaAttention() of kernels/cuda/attention.h hands to tensor cores: KV in bfloat16 or float16,
// GQA with a head_dim of 64 or 128, MLA with latents of 512 + 64.

namespace weft::kernels::cuda {

// Queries and outputs are fp32, or of geometry.kv_dtype; queries are rounded to that one, as are
// softmax weights.
struct TensorCoreAttention {
  const kernels::GqaAttentionParams& geometry;
  const void* q;
  void* out;
  bool fp32;
  std::int32_t max_visible_len;
};

// `workspace`: what GqaTensorCoreWorkspaceBytes() or MlaTensorCoreWorkspaceBytes() says.
absl::Status GqaOnTensorCores(const TensorCoreAttention& params, void* workspace,
                              CudaStream& stream);
absl::Status MlaOnTensorCores(const TensorCoreAttention& params, void* workspace,
                              CudaStream& stream);

// Whatever the batch.
std::int64_t GqaTensorCoreWorkspaceBytes(std::int32_t head_dim);
std::int64_t MlaTensorCoreWorkspaceBytes();

}  // namespace weft::kernels::cuda
