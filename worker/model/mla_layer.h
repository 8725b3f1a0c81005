#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/model/attention_layer.h"

namespace weft {

// Multi-head latent attention: one latent and one rotary key a token are cached, [kv_lora_rank |
// qk_rope_head_dim], whatever the number of heads. In the absorbed form: queries go into the
// latent's space by W_UK, attend to latents as keys and values at once, and W_UV brings what comes
// out back to each head, before or after it is merged: whichever sends less (MergedDim()).
class MlaLayer final : public AttentionLayer {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionLayer>> Create(const ModelConfig& config,
                                                                const ShardLayout& layout,
                                                                std::int32_t max_rows,
                                                                PagedAttention attention);

  absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights,
                   const AttentionStep& step, const float* normed, const float* residual, float* x,
                   kernels::Stream& stream) override;

  std::int64_t workspace_bytes() const override;

 private:
  MlaLayer(const ModelConfig& config, const ShardLayout& layout, PagedAttention attention);

  absl::Status ProjectQueries(const MlaWeights& weights, const AttentionStep& step,
                              const float* normed, kernels::Stream& stream);
  absl::Status AppendLatent(std::int32_t layer, const MlaWeights& weights,
                            const AttentionStep& step, const float* normed,
                            kernels::Stream& stream);
  // For each head of `weights`: its columns of x, `x_dim` of them, times its weight, into its
  // columns of y.
  absl::Status RunHeads(const std::vector<kernels::PackedMatrix>& weights, const float* x,
                        std::int64_t x_dim, std::int64_t x_stride, float* y, std::int64_t y_dim,
                        std::int64_t y_stride, std::int32_t num_rows, kernels::Stream& stream);

  const ModelConfig& config_;
  const MlaConfig& mla_;
  PagedAttention attention_;
  const std::int32_t projected_heads_;
  const std::int32_t group_heads_;
  const std::int32_t own_heads_;
  const bool values_before_merge_;
  std::vector<kernels::LinearParams> products_;  // [group heads]
  kernels::Buffer q_a_;                          // [rows, q_lora_rank]
  kernels::Buffer q_;                            // [rows, projected heads, nope + rope]
  kernels::Buffer latent_;                       // [owned rows, kv_lora_rank + rope]
  kernels::Buffer values_;  // [rows, own heads, v_head_dim]; empty if they come merged
};

}  // namespace weft
