#include "worker/model/mla_layer.h"

#include <utility>

#include "kernels/elementwise.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// Of the norms inside MLA, whatever rms_norm_eps says: the reference's default.
constexpr float kLatentNormEps = 1e-6F;

}  // namespace

MlaLayer::MlaLayer(const ModelConfig& config, const ShardLayout& layout, PagedAttention attention)
    : config_(config),
      mla_(*config.mla),
      attention_(std::move(attention)),
      projected_heads_(layout.ProjectedQHeads().size()),
      group_heads_(layout.GroupQHeads().size()),
      own_heads_(layout.QHeads().size()),
      values_before_merge_(MergedDim(config, layout) < config.value_dim),
      products_(group_heads_) {}

absl::StatusOr<std::unique_ptr<AttentionLayer>> MlaLayer::Create(const ModelConfig& config,
                                                                 const ShardLayout& layout,
                                                                 std::int32_t max_rows,
                                                                 PagedAttention attention) {
  std::unique_ptr<MlaLayer> layer(new MlaLayer(config, layout, std::move(attention)));
  const MlaConfig& mla = layer->mla_;
  const auto rows = [&](std::int64_t floats) {
    return kernels::Buffer::Allocate(max_rows * floats * static_cast<std::int64_t>(sizeof(float)));
  };
  ASSIGN_OR_RETURN(layer->q_a_, rows(mla.q_lora_rank));
  ASSIGN_OR_RETURN(layer->q_, rows(std::int64_t{layer->projected_heads_} * mla.qk_head_dim()));
  ASSIGN_OR_RETURN(layer->latent_, rows(config.head_dim));
  if (!layer->values_before_merge_) {
    ASSIGN_OR_RETURN(layer->values_, rows(std::int64_t{layer->own_heads_} * mla.v_head_dim));
  }
  return layer;
}

std::int64_t MlaLayer::workspace_bytes() const {
  return attention_.workspace_bytes() + q_a_.size_bytes() + q_.size_bytes() + latent_.size_bytes() +
         values_.size_bytes();
}

absl::Status MlaLayer::RunHeads(const std::vector<kernels::PackedMatrix>& weights, const float* x,
                                std::int64_t x_dim, std::int64_t x_stride, float* y,
                                std::int64_t y_dim, std::int64_t y_stride, std::int32_t num_rows,
                                kernels::Stream& stream) {
  const auto heads = static_cast<std::int64_t>(weights.size());
  for (std::int64_t head = 0; head < heads; ++head) {
    products_[head] = {.x = x + head * x_dim,
                       .weight = &weights[head],
                       .bias = nullptr,
                       .residual = nullptr,
                       .y = y + head * y_dim,
                       .num_rows = num_rows,
                       .x_stride = x_stride,
                       .y_stride = y_stride};
  }
  return kernels::GroupedLinear(absl::MakeConstSpan(products_.data(), weights.size()), stream);
}

absl::Status MlaLayer::ProjectQueries(const MlaWeights& weights, const AttentionStep& step,
                                      const float* normed, kernels::Stream& stream) {
  const std::int32_t num_rows = step.rows.num_rows();
  const float* from = normed;
  std::int64_t from_size = config_.hidden_size;
  if (mla_.q_lora_rank > 0) {
    RETURN_IF_ERROR(kernels::Linear({.x = normed,
                                     .weight = &weights.q_a,
                                     .bias = OrNull(weights.q_a_bias),
                                     .residual = nullptr,
                                     .y = q_a_.as<float>(),
                                     .num_rows = num_rows,
                                     .x_stride = config_.hidden_size,
                                     .y_stride = mla_.q_lora_rank},
                                    stream));
    RETURN_IF_ERROR(kernels::RmsNorm({.x = q_a_.as<float>(),
                                      .weight = weights.q_a_norm.data(),
                                      .out = q_a_.as<float>(),
                                      .num_rows = num_rows,
                                      .size = mla_.q_lora_rank,
                                      .eps = kLatentNormEps},
                                     stream));
    from = q_a_.as<float>();
    from_size = mla_.q_lora_rank;
  }
  const std::int64_t q_dim = mla_.qk_head_dim();
  float* q = q_.as<float>();
  RETURN_IF_ERROR(kernels::Linear({.x = from,
                                   .weight = &weights.q_b,
                                   .bias = nullptr,
                                   .residual = nullptr,
                                   .y = q,
                                   .num_rows = num_rows,
                                   .x_stride = from_size,
                                   .y_stride = projected_heads_ * q_dim},
                                  stream));
  float* absorbed = attention_.Queries(num_rows);
  RETURN_IF_ERROR(RunHeads(weights.k_up, q, q_dim, projected_heads_ * q_dim, absorbed,
                           config_.head_dim, attention_.query_stride(), num_rows, stream));
  return kernels::Rope({.x = q + mla_.qk_nope_head_dim,
                        .cos = step.cos,
                        .sin = step.sin,
                        .num_rows = num_rows,
                        .num_heads = projected_heads_,
                        .head_dim = mla_.qk_rope_head_dim,
                        .row_stride = projected_heads_ * q_dim,
                        .head_stride = q_dim,
                        .out = absorbed + mla_.kv_lora_rank,
                        .out_row_stride = attention_.query_stride(),
                        .out_head_stride = config_.head_dim},
                       stream);
}

absl::Status MlaLayer::AppendLatent(std::int32_t layer, const MlaWeights& weights,
                                    const AttentionStep& step, const float* normed,
                                    kernels::Stream& stream) {
  const auto num_owned = static_cast<std::int32_t>(step.rows.owned_row.size());
  ASSIGN_OR_RETURN(const float* owned_x, attention_.OwnedRows(step, normed, stream));
  float* latent = latent_.as<float>();
  RETURN_IF_ERROR(kernels::Linear({.x = owned_x,
                                   .weight = &weights.kv_a,
                                   .bias = OrNull(weights.kv_a_bias),
                                   .residual = nullptr,
                                   .y = latent,
                                   .num_rows = num_owned,
                                   .x_stride = config_.hidden_size,
                                   .y_stride = config_.head_dim},
                                  stream));
  RETURN_IF_ERROR(kernels::RmsNorm({.x = latent,
                                    .weight = weights.kv_a_norm.data(),
                                    .out = latent,
                                    .num_rows = num_owned,
                                    .size = mla_.kv_lora_rank,
                                    .eps = kLatentNormEps,
                                    .row_stride = config_.head_dim},
                                   stream));
  RETURN_IF_ERROR(kernels::Rope({.x = latent + mla_.kv_lora_rank,
                                 .cos = step.owned_cos,
                                 .sin = step.owned_sin,
                                 .num_rows = num_owned,
                                 .num_heads = 1,
                                 .head_dim = mla_.qk_rope_head_dim,
                                 .row_stride = config_.head_dim},
                                stream));
  return attention_.Append(layer, step, latent, nullptr, config_.head_dim, stream);
}

absl::Status MlaLayer::Run(std::int32_t layer, const DecoderLayerWeights& weights,
                           const AttentionStep& step, const float* normed, const float* residual,
                           float* x, kernels::Stream& stream) {
  const std::int32_t num_rows = step.rows.num_rows();
  RETURN_IF_ERROR(ProjectQueries(weights.mla, step, normed, stream));
  RETURN_IF_ERROR(AppendLatent(layer, weights.mla, step, normed, stream));
  const std::vector<kernels::PackedMatrix>& v_up = weights.mla.v_up;
  ASSIGN_OR_RETURN(const float* attended, attention_.Attend(layer, step, stream));
  if (values_before_merge_) {
    RETURN_IF_ERROR(RunHeads(v_up, attended, mla_.kv_lora_rank,
                             std::int64_t{group_heads_} * mla_.kv_lora_rank, attention_.Partial(),
                             mla_.v_head_dim, std::int64_t{group_heads_} * mla_.v_head_dim,
                             num_rows, stream));
  }
  ASSIGN_OR_RETURN(const float* values, attention_.Merge(num_rows, stream));
  std::int64_t values_stride = attention_.merged_stride();
  if (!values_before_merge_) {
    const float* merged = values;
    values = values_.as<float>();
    values_stride = std::int64_t{own_heads_} * mla_.v_head_dim;
    RETURN_IF_ERROR(RunHeads(v_up, merged, mla_.kv_lora_rank, attention_.merged_stride(),
                             values_.as<float>(), mla_.v_head_dim, values_stride, num_rows,
                             stream));
  }
  return kernels::Linear({.x = values,
                          .weight = &weights.o,
                          .bias = OrNull(weights.o_bias),
                          .residual = residual,
                          .y = x,
                          .num_rows = num_rows,
                          .x_stride = values_stride,
                          .y_stride = config_.hidden_size},
                         stream);
}

}  // namespace weft
