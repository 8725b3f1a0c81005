#include "worker/model/gqa_layer.h"

#include <cmath>
#include <utility>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<GqaLayer> GqaLayer::Create(const ModelConfig& config, const ShardLayout& layout,
                                          std::int32_t max_rows, DcpExchange exchange,
                                          KvCache& cache, Communicator& dcp,
                                          kernels::Stream& stream) {
  ASSIGN_OR_RETURN(
      DcpAttention dcp_attention,
      DcpAttention::Create(layout, config.head_dim, config.head_dim, max_rows, exchange, dcp));
  GqaLayer gqa(std::move(dcp_attention));
  gqa.config_ = &config;
  gqa.cache_ = &cache;
  gqa.projected_heads_ = layout.ProjectedQHeads();
  gqa.group_heads_ = layout.GroupQHeads();
  gqa.kv_heads_ = layout.GroupKvHeads();
  gqa.q_per_kv_ = layout.q_per_kv();
  gqa.head_dim_ = config.head_dim;
  gqa.hidden_size_ = config.hidden_size;
  gqa.block_tokens_per_rank_ = layout.block_tokens_per_rank();

  constexpr std::int64_t f = sizeof(float);
  const std::int64_t rows = max_rows;
  ASSIGN_OR_RETURN(gqa.owned_x_, kernels::Buffer::Allocate(rows * config.hidden_size * f));
  ASSIGN_OR_RETURN(
      gqa.kv_, kernels::Buffer::Allocate(rows * 2 * gqa.kv_heads_.size() * config.head_dim * f));
  ASSIGN_OR_RETURN(
      gqa.attention_workspace_,
      kernels::Buffer::Allocate(kernels::GqaAttentionWorkspaceBytes(
          max_rows, gqa.group_heads_.size(), config.head_dim, config.head_dim, stream)));
  return gqa;
}

std::int64_t GqaLayer::workspace_bytes() const {
  return dcp_attention_.workspace_bytes() + owned_x_.size_bytes() + kv_.size_bytes() +
         attention_workspace_.size_bytes();
}

absl::Status GqaLayer::NormHeads(const std::vector<float>& weight, std::int32_t num_rows,
                                 std::int32_t num_heads, std::int64_t row_stride, float* x,
                                 kernels::Stream& stream) const {
  if (weight.empty()) return absl::OkStatus();
  return kernels::RmsNorm({.x = x,
                           .weight = weight.data(),
                           .out = x,
                           .num_rows = num_rows,
                           .size = head_dim_,
                           .eps = config_->rms_norm_eps,
                           .num_heads = num_heads,
                           .row_stride = row_stride},
                          stream);
}

absl::Status GqaLayer::ProjectAndAppend(std::int32_t layer, const DecoderLayerWeights& weights,
                                        const Step& step, const float* normed,
                                        kernels::Stream& stream) {
  const std::int32_t num_rows = step.rows.num_rows();
  const std::int64_t q_stride = dcp_attention_.query_stride();
  float* q = dcp_attention_.Queries(num_rows);
  RETURN_IF_ERROR(kernels::Linear({.x = normed,
                                   .weight = &weights.q,
                                   .bias = OrNull(weights.q_bias),
                                   .residual = nullptr,
                                   .y = q,
                                   .num_rows = num_rows,
                                   .x_stride = hidden_size_,
                                   .y_stride = q_stride},
                                  stream));
  RETURN_IF_ERROR(
      NormHeads(weights.q_norm, num_rows, projected_heads_.size(), q_stride, q, stream));
  RETURN_IF_ERROR(kernels::Rope({.x = q,
                                 .cos = step.cos,
                                 .sin = step.sin,
                                 .num_rows = num_rows,
                                 .num_heads = projected_heads_.size(),
                                 .head_dim = head_dim_,
                                 .row_stride = q_stride},
                                stream));

  const auto num_owned = static_cast<std::int32_t>(step.rows.owned_row.size());
  const float* owned_x = normed;
  if (num_owned != num_rows) {
    owned_x = owned_x_.as<float>();
    RETURN_IF_ERROR(kernels::GatherRows({.in = normed,
                                         .index = step.rows.owned_row.data(),
                                         .out = owned_x_.as<float>(),
                                         .num_rows = num_owned,
                                         .size = hidden_size_},
                                        stream));
  }
  const std::int32_t k_size = kv_heads_.size() * head_dim_;
  float* kv = kv_.as<float>();
  RETURN_IF_ERROR(kernels::Linear({.x = owned_x,
                                   .weight = &weights.kv,
                                   .bias = OrNull(weights.kv_bias),
                                   .residual = nullptr,
                                   .y = kv,
                                   .num_rows = num_owned,
                                   .x_stride = hidden_size_,
                                   .y_stride = 2 * k_size},
                                  stream));
  RETURN_IF_ERROR(NormHeads(weights.k_norm, num_owned, kv_heads_.size(), 2 * k_size, kv, stream));
  RETURN_IF_ERROR(kernels::Rope({.x = kv,
                                 .cos = step.owned_cos,
                                 .sin = step.owned_sin,
                                 .num_rows = num_owned,
                                 .num_heads = kv_heads_.size(),
                                 .head_dim = head_dim_,
                                 .row_stride = 2 * k_size},
                                stream));
  return kernels::KvAppend({.k = kv,
                            .v = kv + k_size,
                            .slots = step.rows.owned_kv_slot.data(),
                            .k_blocks = cache_->k_blocks(layer),
                            .v_blocks = cache_->v_blocks(layer),
                            .num_rows = num_owned,
                            .num_kv_heads = kv_heads_.size(),
                            .head_dim = head_dim_,
                            .block_tokens_per_rank = block_tokens_per_rank_,
                            .kv_stride = 2 * k_size,
                            .kv_dtype = cache_->shape().dtype},
                           stream);
}

absl::Status GqaLayer::Run(std::int32_t layer, const DecoderLayerWeights& weights, const Step& step,
                           const float* normed, const float* residual, float* x,
                           kernels::Stream& stream) {
  const std::int32_t num_rows = step.rows.num_rows();
  RETURN_IF_ERROR(ProjectAndAppend(layer, weights, step, normed, stream));
  ASSIGN_OR_RETURN(const float* group_q, dcp_attention_.GatherQueries(num_rows, stream));
  const std::vector<std::int32_t>& first_visible =
      config_->HasWindow(layer) ? step.rows.first_in_window : step.rows.first_visible;
  RETURN_IF_ERROR(kernels::GqaAttention({.q = group_q,
                                         .k_blocks = cache_->k_blocks(layer),
                                         .v_blocks = cache_->v_blocks(layer),
                                         .block_table = step.slots.block_table(),
                                         .row_slot = step.rows.slot.data(),
                                         .first_visible = first_visible.data(),
                                         .visible_len = step.rows.visible_len.data(),
                                         .out = dcp_attention_.PartialOutput(),
                                         .lse = dcp_attention_.PartialLse(),
                                         .num_rows = num_rows,
                                         .num_q_heads = group_heads_.size(),
                                         .num_kv_heads = kv_heads_.size(),
                                         .first_q_head = group_heads_.begin,
                                         .first_kv_head = kv_heads_.begin,
                                         .q_per_kv = q_per_kv_,
                                         .head_dim = head_dim_,
                                         .value_dim = head_dim_,
                                         .block_tokens_per_rank = block_tokens_per_rank_,
                                         .max_blocks_per_seq = step.slots.max_blocks_per_seq(),
                                         .kv_dtype = cache_->shape().dtype,
                                         .scale = 1.0f / std::sqrt(static_cast<float>(head_dim_))},
                                        attention_workspace_.data(), stream));
  ASSIGN_OR_RETURN(const float* merged, dcp_attention_.Merge(num_rows, stream));
  return kernels::Linear({.x = merged,
                          .weight = &weights.o,
                          .bias = OrNull(weights.o_bias),
                          .residual = residual,
                          .y = x,
                          .num_rows = num_rows,
                          .x_stride = dcp_attention_.merged_stride(),
                          .y_stride = hidden_size_},
                         stream);
}

}  // namespace weft
