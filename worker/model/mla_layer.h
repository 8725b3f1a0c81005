#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "worker/model/attention_layer.h"

namespace weft {

// Multi-head latent attention: one latent and one rotary key a token are cached, [kv_lora_rank |
// qk_rope_head_dim], whatever the number of heads. Rows attend in one of two ways.
//
// Absorbed: queries go into the latent's space by W_UK, attend to latents as keys and values at
// once, and W_UV brings what comes out back to each head, before or after it is merged: whichever
// sends less (MergedDim()). Decompressed: MlaPrefill makes keys and values of latents. A prompt's
// rows take the form that CostOf() says is the cheapest, which the plan alone decides (law 4).
class MlaLayer final : public AttentionLayer {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionLayer>> Create(
      const ModelConfig& config, const ShardLayout& layout, const AttentionOptions& options,
      PagedAttention attention, KvCache& cache, Communicator& dcp, kernels::Stream& stream);

  void BeginStep(const AttentionStep& step) override;
  absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights,
                   const AttentionStep& step, const float* normed, const float* residual, float* x,
                   kernels::Stream& stream) override;

  std::int64_t workspace_bytes() const override;

 private:
  MlaLayer(const ModelConfig& config, const ShardLayout& layout, const AttentionOptions& options,
           PagedAttention attention);

  MlaForm FormOf(const StepRows::Sequence& sequence) const;
  absl::Status ProjectQueries(const MlaWeights& weights, const AttentionStep& step,
                              const float* normed, kernels::Stream& stream);
  // Queries of the absorbed rows, in the latent's space.
  absl::Status AbsorbQueries(const MlaWeights& weights, const AttentionStep& step,
                             kernels::Stream& stream);
  absl::Status AppendLatent(std::int32_t layer, const MlaWeights& weights,
                            const AttentionStep& step, const float* normed,
                            kernels::Stream& stream);
  // The absorbed rows' values, of this rank's own heads: where they came merged, or in values_.
  struct Values {
    const float* data;
    std::int64_t stride;
  };
  absl::StatusOr<Values> AttendAbsorbed(std::int32_t layer, const MlaWeights& weights,
                                        const AttentionStep& step, kernels::Stream& stream);
  // Values of all other rows, into values_.
  absl::Status AttendDecompressed(std::int32_t layer, const MlaWeights& weights,
                                  const AttentionStep& step, kernels::Stream& stream);
  // For each head of `weights`: its columns of x, `x_dim` of them, times its weight, into its
  // columns of y.
  absl::Status RunHeads(const kernels::MatrixGroup& weights, const float* x, std::int64_t x_dim,
                        std::int64_t x_stride, float* y, std::int64_t y_dim, std::int64_t y_stride,
                        std::int32_t num_rows, kernels::Stream& stream);

  const ModelConfig& config_;
  const MlaConfig& mla_;
  const ShardLayout layout_;
  const AttentionOptions options_;
  PagedAttention attention_;
  std::optional<MlaPrefill> prefill_;  // absent: all rows are absorbed
  const std::int32_t projected_heads_;
  const std::int32_t group_heads_;
  const std::int32_t own_heads_;
  const bool values_before_merge_;

  // Of the step: rows that are absorbed, packed, and as runs of the step's rows; what they see.
  std::int32_t num_absorbed_ = 0;
  std::vector<IndexRange> runs_;
  std::vector<std::int32_t> slot_;  // this and the next two not without prefill_
  std::vector<std::int32_t> first_visible_;
  std::vector<std::int32_t> visible_len_;
  struct Decompressed {
    StepRows::Sequence rows;
    MlaForm form;
    std::int32_t absorbed_row;  // of kChunk: where its rows are among the absorbed
  };
  std::vector<Decompressed> decompressed_;

  std::vector<kernels::LinearParams> products_;  // [group heads]
  kernels::Buffer q_a_;                          // [rows, q_lora_rank]
  kernels::Buffer q_;                            // [rows, projected heads, nope + rope]
  kernels::Buffer latent_;                       // [owned rows, kv_lora_rank + rope]
  kernels::Buffer values_;                       // [rows, own heads, v_head_dim]
};

}  // namespace weft
