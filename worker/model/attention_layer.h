#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/paged_attention.h"

namespace weft {

// The attention of every layer of one rank. Allocates nothing once it is made. One thread.
class AttentionLayer {
 public:
  virtual ~AttentionLayer() = default;

  // x += this rank's part of Attention(normed), both [num_rows, hidden]: the sum of all ranks' x is
  // the layer's output when `residual` is x on exactly one rank and null on the others.
  virtual absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights,
                           const AttentionStep& step, const float* normed, const float* residual,
                           float* x, kernels::Stream& stream) = 0;

  virtual std::int64_t workspace_bytes() const = 0;
};

// What the model of `config`, which outlives it, attends with.
absl::StatusOr<std::unique_ptr<AttentionLayer>> MakeAttentionLayer(const ModelConfig& config,
                                                                   const ShardLayout& layout,
                                                                   std::int32_t max_rows,
                                                                   PagedAttention attention);

}  // namespace weft
