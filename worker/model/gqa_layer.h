#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/model/attention_layer.h"

namespace weft {

// Grouped-query attention: K and V of each KV head are cached. Biases, QK norm and a window where
// the model has them.
class GqaLayer final : public AttentionLayer {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionLayer>> Create(const ModelConfig& config,
                                                                const ShardLayout& layout,
                                                                std::int32_t max_rows,
                                                                PagedAttention attention,
                                                                kernels::Stream& stream);

  void BeginStep(const AttentionStep&) override {}
  absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights,
                   const AttentionStep& step, const float* normed, const float* residual, float* x,
                   kernels::Stream& stream) override;

  std::int64_t workspace_bytes() const override;

 private:
  GqaLayer(const ModelConfig& config, const ShardLayout& layout, PagedAttention attention);

  absl::Status ProjectQueries(const DecoderLayerWeights& weights, const AttentionStep& step,
                              const float* normed, kernels::Stream& stream);
  absl::Status AppendKv(std::int32_t layer, const DecoderLayerWeights& weights,
                        const AttentionStep& step, const float* normed, kernels::Stream& stream);
  // In place; nothing where `weight` is empty.
  absl::Status NormHeads(const kernels::Vector& weight, std::int32_t num_rows,
                         std::int32_t num_heads, std::int64_t row_stride, float* x,
                         kernels::Stream& stream) const;

  const ModelConfig& config_;
  PagedAttention attention_;
  const std::int32_t projected_heads_;
  const std::int32_t kv_heads_;  // of the DCP group
  kernels::Buffer kv_;           // [owned rows, 2 * kv heads * head_dim]
};

}  // namespace weft
