#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "worker/model/dcp_attention.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_config.h"
#include "worker/model/shard_layout.h"
#include "worker/model/step_rows.h"

namespace weft {

// Grouped-query attention of every layer of one rank: projections, QK norm, RoPE, append at owned
// positions, local attention, exchange and merge, output projection. Allocates nothing after
// Create(). One thread.
class GqaLayer {
 public:
  // What is the same for all layers of a step.
  struct Step {
    const StepRows& rows;
    const SlotTable& slots;
    const float* cos;  // [num_rows, head_dim / 2]
    const float* sin;
    const float* owned_cos;  // [owned rows, head_dim / 2]
    const float* owned_sin;
  };

  // `config`, `cache` and `dcp` outlive this.
  static absl::StatusOr<GqaLayer> Create(const ModelConfig& config, const ShardLayout& layout,
                                         std::int32_t max_rows, DcpExchange exchange,
                                         KvCache& cache, Communicator& dcp,
                                         kernels::Stream& stream);

  // x += this rank's part of Attention(normed): the sum of all ranks' x is the layer's output when
  // `residual` is x on exactly one rank and null on the others.
  absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights, const Step& step,
                   const float* normed, const float* residual, float* x, kernels::Stream& stream);

  std::int64_t workspace_bytes() const;

 private:
  explicit GqaLayer(DcpAttention dcp_attention) : dcp_attention_(std::move(dcp_attention)) {}

  // In place; nothing where `weight` is empty.
  absl::Status NormHeads(const std::vector<float>& weight, std::int32_t num_rows,
                         std::int32_t num_heads, std::int64_t row_stride, float* x,
                         kernels::Stream& stream) const;
  absl::Status ProjectAndAppend(std::int32_t layer, const DecoderLayerWeights& weights,
                                const Step& step, const float* normed, kernels::Stream& stream);

  const ModelConfig* config_ = nullptr;
  DcpAttention dcp_attention_;
  KvCache* cache_ = nullptr;
  IndexRange projected_heads_;
  IndexRange group_heads_;
  IndexRange kv_heads_;
  std::int32_t q_per_kv_ = 1;
  std::int32_t head_dim_ = 0;
  std::int32_t hidden_size_ = 0;
  std::int32_t block_tokens_per_rank_ = 0;

  kernels::Buffer owned_x_;  // [owned rows, hidden]
  kernels::Buffer kv_;       // [owned rows, 2 * kv heads * head_dim]
  kernels::Buffer attention_workspace_;
};

}  // namespace weft
