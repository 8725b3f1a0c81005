#include "worker/model/gqa_layer.h"

#include <utility>

#include "kernels/elementwise.h"
#include "server/base/status_macros.h"

namespace weft {

GqaLayer::GqaLayer(const ModelConfig& config, const ShardLayout& layout, PagedAttention attention)
    : config_(config),
      attention_(std::move(attention)),
      projected_heads_(layout.ProjectedQHeads().size()),
      kv_heads_(layout.GroupKvHeads().size()) {}

absl::StatusOr<std::unique_ptr<AttentionLayer>> GqaLayer::Create(const ModelConfig& config,
                                                                 const ShardLayout& layout,
                                                                 std::int32_t max_rows,
                                                                 PagedAttention attention,
                                                                 kernels::Stream& stream) {
  std::unique_ptr<GqaLayer> gqa(new GqaLayer(config, layout, std::move(attention)));
  ASSIGN_OR_RETURN(gqa->kv_, kernels::Buffer::Allocate(std::int64_t{max_rows} * 2 * gqa->kv_heads_ *
                                                           config.head_dim *
                                                           static_cast<std::int64_t>(sizeof(float)),
                                                       stream));
  return gqa;
}

std::int64_t GqaLayer::workspace_bytes() const {
  return attention_.workspace_bytes() + kv_.size_bytes();
}

absl::Status GqaLayer::NormHeads(const kernels::Vector& weight, std::int32_t num_rows,
                                 std::int32_t num_heads, std::int64_t row_stride, float* x,
                                 kernels::Stream& stream) const {
  if (weight.empty()) return absl::OkStatus();
  return kernels::RmsNorm({.x = x,
                           .weight = weight.data(),
                           .out = x,
                           .num_rows = num_rows,
                           .size = config_.head_dim,
                           .eps = config_.rms_norm_eps,
                           .num_heads = num_heads,
                           .row_stride = row_stride},
                          stream);
}

absl::Status GqaLayer::ProjectQueries(const DecoderLayerWeights& weights, const AttentionStep& step,
                                      const float* normed, kernels::Stream& stream) {
  const std::int32_t num_rows = step.num_rows;
  const std::int64_t q_stride = attention_.query_stride();
  float* q = attention_.Queries(num_rows);
  RETURN_IF_ERROR(kernels::Linear({.x = normed,
                                   .weight = &weights.q,
                                   .bias = weights.q_bias.data(),
                                   .residual = nullptr,
                                   .y = q,
                                   .num_rows = num_rows,
                                   .x_stride = config_.hidden_size,
                                   .y_stride = q_stride},
                                  stream));
  RETURN_IF_ERROR(NormHeads(weights.q_norm, num_rows, projected_heads_, q_stride, q, stream));
  return kernels::Rope({.x = q,
                        .cos = step.cos,
                        .sin = step.sin,
                        .num_rows = num_rows,
                        .num_heads = projected_heads_,
                        .head_dim = config_.head_dim,
                        .row_stride = q_stride},
                       stream);
}

absl::Status GqaLayer::AppendKv(std::int32_t layer, const DecoderLayerWeights& weights,
                                const AttentionStep& step, const float* normed,
                                kernels::Stream& stream) {
  const std::int32_t num_owned = step.num_owned;
  ASSIGN_OR_RETURN(const float* owned_x, attention_.OwnedRows(step, normed, stream));
  const std::int32_t k_size = kv_heads_ * config_.head_dim;
  float* kv = kv_.as<float>();
  RETURN_IF_ERROR(kernels::Linear({.x = owned_x,
                                   .weight = &weights.kv,
                                   .bias = weights.kv_bias.data(),
                                   .residual = nullptr,
                                   .y = kv,
                                   .num_rows = num_owned,
                                   .x_stride = config_.hidden_size,
                                   .y_stride = 2 * k_size},
                                  stream));
  RETURN_IF_ERROR(NormHeads(weights.k_norm, num_owned, kv_heads_, 2 * k_size, kv, stream));
  RETURN_IF_ERROR(kernels::Rope({.x = kv,
                                 .cos = step.owned_cos,
                                 .sin = step.owned_sin,
                                 .num_rows = num_owned,
                                 .num_heads = kv_heads_,
                                 .head_dim = config_.head_dim,
                                 .row_stride = 2 * k_size},
                                stream));
  return attention_.Append(layer, step, kv, kv + k_size, 2 * k_size, stream);
}

absl::Status GqaLayer::Run(std::int32_t layer, const DecoderLayerWeights& weights,
                           const AttentionStep& step, const float* normed, const float* residual,
                           float* x, kernels::Stream& stream) {
  RETURN_IF_ERROR(ProjectQueries(weights, step, normed, stream));
  RETURN_IF_ERROR(AppendKv(layer, weights, step, normed, stream));
  RETURN_IF_ERROR(attention_.Attend(layer, step, stream).status());
  ASSIGN_OR_RETURN(const float* merged, attention_.Merge(step.num_rows, stream));
  return kernels::Linear({.x = merged,
                          .weight = &weights.o,
                          .bias = weights.o_bias.data(),
                          .residual = residual,
                          .y = x,
                          .num_rows = step.num_rows,
                          .x_stride = attention_.merged_stride(),
                          .y_stride = config_.hidden_size},
                         stream);
}

}  // namespace weft
