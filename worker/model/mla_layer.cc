#include "worker/model/mla_layer.h"

#include <limits>
#include <utility>

#include "kernels/device/device_stream.h"
#include "kernels/elementwise.h"
#include "kernels/latents.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// Of the norms inside MLA, whatever rms_norm_eps says: the reference's default.
constexpr float kLatentNormEps = 1e-6F;

}  // namespace

MlaLayer::MlaLayer(const ModelConfig& config, const ShardLayout& layout,
                   const AttentionOptions& options, PagedAttention attention)
    : config_(config),
      mla_(*config.mla),
      layout_(layout),
      options_(options),
      attention_(std::move(attention)),
      projected_heads_(layout.ProjectedQHeads().size()),
      group_heads_(layout.GroupQHeads().size()),
      own_heads_(layout.QHeads().size()),
      values_before_merge_(MergedDim(config, layout) < config.value_dim),
      products_(group_heads_) {}

absl::StatusOr<std::unique_ptr<AttentionLayer>> MlaLayer::Create(
    const ModelConfig& config, const ShardLayout& layout, const AttentionOptions& options,
    PagedAttention attention, KvCache& cache, Communicator& dcp, kernels::Stream& stream) {
  std::unique_ptr<MlaLayer> layer(new MlaLayer(config, layout, options, std::move(attention)));
  const MlaConfig& mla = layer->mla_;
  const std::int32_t max_rows = options.max_rows;
  const auto rows = [&](std::int64_t floats) {
    return kernels::Buffer::Allocate(max_rows * floats * static_cast<std::int64_t>(sizeof(float)),
                                     stream);
  };
  ASSIGN_OR_RETURN(layer->q_a_, rows(mla.q_lora_rank));
  ASSIGN_OR_RETURN(layer->q_, rows(std::int64_t{layer->projected_heads_} * mla.qk_head_dim()));
  ASSIGN_OR_RETURN(layer->latent_, rows(config.head_dim));
  ASSIGN_OR_RETURN(layer->values_, rows(std::int64_t{layer->own_heads_} * mla.v_head_dim));
  // On a device all rows are absorbed.
  if (CanDecompress(config) && stream.device() == kernels::DeviceKind::kCpu) {
    ASSIGN_OR_RETURN(layer->prefill_,
                     MlaPrefill::Create(config, layout, max_rows, cache, dcp, stream));
  }
  for (auto* column : {&layer->slot_, &layer->first_visible_, &layer->visible_len_}) {
    column->reserve(max_rows);
  }
  layer->runs_.reserve(max_rows);
  layer->decompressed_.reserve(max_rows);
  return layer;
}

MlaForm MlaLayer::FormOf(const StepRows::Sequence& sequence) const {
  // A few rows are quick in any form; alike, they take one pass together.
  constexpr std::int32_t kFewRows = 8;
  if (!prefill_.has_value()) return MlaForm::kAbsorbed;
  if (options_.mla_form.has_value()) return *options_.mla_form;
  if (sequence.num_rows < kFewRows) return MlaForm::kAbsorbed;
  MlaForm best = MlaForm::kAbsorbed;
  double least = std::numeric_limits<double>::infinity();
  for (MlaForm form : {MlaForm::kAbsorbed, MlaForm::kChunk, MlaForm::kWhole}) {
    const double cost = CostOf(form, config_, layout_, sequence.num_rows, sequence.first_position,
                               options_.exchange)
                            .total();
    if (cost >= least) continue;
    least = cost;
    best = form;
  }
  return best;
}

void MlaLayer::BeginStep(const AttentionStep& step) {
  runs_.clear();
  slot_.clear();
  first_visible_.clear();
  visible_len_.clear();
  decompressed_.clear();
  if (!prefill_.has_value()) {
    runs_.push_back({0, step.num_rows});
    num_absorbed_ = step.num_rows;
    return;
  }
  for (const StepRows::Sequence& sequence : step.rows.sequences) {
    const MlaForm form = FormOf(sequence);
    const auto absorbed_row = static_cast<std::int32_t>(slot_.size());
    if (form != MlaForm::kAbsorbed) {
      decompressed_.push_back({.rows = sequence, .form = form, .absorbed_row = absorbed_row});
    }
    if (form == MlaForm::kWhole) continue;
    const std::int32_t first = sequence.first_row;
    if (runs_.empty() || runs_.back().end != first) runs_.push_back({first, first});
    runs_.back().end = first + sequence.num_rows;
    for (std::int32_t row = first; row < first + sequence.num_rows; ++row) {
      slot_.push_back(sequence.slot);
      first_visible_.push_back(0);
      visible_len_.push_back(
          form == MlaForm::kAbsorbed
              ? step.rows.visible_len[row]
              : static_cast<std::int32_t>(layout_.LocalLength(sequence.first_position)));
    }
  }
  num_absorbed_ = static_cast<std::int32_t>(slot_.size());
}

std::int64_t MlaLayer::workspace_bytes() const {
  return attention_.workspace_bytes() + q_a_.size_bytes() + q_.size_bytes() + latent_.size_bytes() +
         values_.size_bytes() + (prefill_.has_value() ? prefill_->workspace_bytes() : 0);
}

absl::Status MlaLayer::RunHeads(const kernels::MatrixGroup& weights, const float* x,
                                std::int64_t x_dim, std::int64_t x_stride, float* y,
                                std::int64_t y_dim, std::int64_t y_stride, std::int32_t num_rows,
                                kernels::Stream& stream) {
  if (kernels::DeviceStream* const device = kernels::OnDevice(stream)) {
    return device->GroupedLinear({.x = x,
                                  .weights = &weights,
                                  .y = y,
                                  .max_rows = num_rows,
                                  .x_stride = x_stride,
                                  .y_stride = y_stride,
                                  .x_group_stride = x_dim,
                                  .y_group_stride = y_dim});
  }
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
  const std::int32_t num_rows = step.num_rows;
  const float* from = normed;
  std::int64_t from_size = config_.hidden_size;
  if (mla_.q_lora_rank > 0) {
    RETURN_IF_ERROR(kernels::Linear({.x = normed,
                                     .weight = &weights.q_a,
                                     .bias = weights.q_a_bias.data(),
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
  return kernels::Linear({.x = from,
                          .weight = &weights.q_b,
                          .bias = nullptr,
                          .residual = nullptr,
                          .y = q_.as<float>(),
                          .num_rows = num_rows,
                          .x_stride = from_size,
                          .y_stride = std::int64_t{projected_heads_} * mla_.qk_head_dim()},
                         stream);
}

absl::Status MlaLayer::AbsorbQueries(const MlaWeights& weights, const AttentionStep& step,
                                     kernels::Stream& stream) {
  const std::int64_t q_dim = mla_.qk_head_dim();
  const std::int64_t q_stride = projected_heads_ * q_dim;
  const std::int32_t half = config_.rotary_dim / 2;
  float* absorbed = attention_.Queries(num_absorbed_);
  for (const IndexRange run : runs_) {
    float* q = q_.as<float>() + run.begin * q_stride;
    RETURN_IF_ERROR(RunHeads(weights.k_up, q, q_dim, q_stride, absorbed, config_.head_dim,
                             attention_.query_stride(), run.size(), stream));
    RETURN_IF_ERROR(kernels::Rope({.x = q + mla_.qk_nope_head_dim,
                                   .cos = step.cos + std::int64_t{run.begin} * half,
                                   .sin = step.sin + std::int64_t{run.begin} * half,
                                   .num_rows = run.size(),
                                   .num_heads = projected_heads_,
                                   .head_dim = mla_.qk_rope_head_dim,
                                   .row_stride = q_stride,
                                   .head_stride = q_dim,
                                   .out = absorbed + mla_.kv_lora_rank,
                                   .out_row_stride = attention_.query_stride(),
                                   .out_head_stride = config_.head_dim},
                                  stream));
    absorbed += run.size() * attention_.query_stride();
  }
  return absl::OkStatus();
}

absl::Status MlaLayer::AppendLatent(std::int32_t layer, const MlaWeights& weights,
                                    const AttentionStep& step, const float* normed,
                                    kernels::Stream& stream) {
  const std::int32_t num_owned = step.num_owned;
  ASSIGN_OR_RETURN(const float* owned_x, attention_.OwnedRows(step, normed, stream));
  float* latent = latent_.as<float>();
  RETURN_IF_ERROR(kernels::Linear({.x = owned_x,
                                   .weight = &weights.kv_a,
                                   .bias = weights.kv_a_bias.data(),
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

absl::StatusOr<MlaLayer::Values> MlaLayer::AttendAbsorbed(std::int32_t layer,
                                                          const MlaWeights& weights,
                                                          const AttentionStep& step,
                                                          kernels::Stream& stream) {
  const std::int32_t num_rows = num_absorbed_;
  const std::int64_t stride = std::int64_t{own_heads_} * mla_.v_head_dim;
  RETURN_IF_ERROR(AbsorbQueries(weights, step, stream));
  const VisibleRows rows{.num_rows = num_rows,
                         .slot = slot_.data(),
                         .first_visible = first_visible_.data(),
                         .visible_len = visible_len_.data()};
  // Without others, they are the step's rows.
  ASSIGN_OR_RETURN(const float* attended,
                   decompressed_.empty() ? attention_.Attend(layer, step, stream)
                                         : attention_.Attend(layer, rows, step.arrays, stream));
  if (values_before_merge_) {
    RETURN_IF_ERROR(RunHeads(weights.v_up, attended, mla_.kv_lora_rank,
                             std::int64_t{group_heads_} * mla_.kv_lora_rank, attention_.Partial(),
                             mla_.v_head_dim, std::int64_t{group_heads_} * mla_.v_head_dim,
                             num_rows, stream));
  }
  ASSIGN_OR_RETURN(const float* merged, attention_.Merge(num_rows, stream));
  if (values_before_merge_ && decompressed_.empty()) {
    return Values{merged, attention_.merged_stride()};
  }
  for (const IndexRange run : runs_) {
    float* values = values_.as<float>() + run.begin * stride;
    if (values_before_merge_) {
      RETURN_IF_ERROR(kernels::CopyColumns({.in = merged,
                                            .out = values,
                                            .num_rows = run.size(),
                                            .num_heads = 1,
                                            .size = own_heads_ * mla_.v_head_dim,
                                            .in_row_stride = attention_.merged_stride(),
                                            .in_head_stride = 0,
                                            .out_row_stride = stride,
                                            .out_head_stride = 0},
                                           stream));
    } else {
      RETURN_IF_ERROR(RunHeads(weights.v_up, merged, mla_.kv_lora_rank, attention_.merged_stride(),
                               values, mla_.v_head_dim, stride, run.size(), stream));
    }
    merged += run.size() * attention_.merged_stride();
  }
  return Values{values_.as<float>(), stride};
}

absl::Status MlaLayer::AttendDecompressed(std::int32_t layer, const MlaWeights& weights,
                                          const AttentionStep& step, kernels::Stream& stream) {
  const std::int64_t q_stride = std::int64_t{projected_heads_} * mla_.qk_head_dim();
  const std::int64_t own_q =
      (layout_.QHeads().begin - layout_.ProjectedQHeads().begin) * mla_.qk_head_dim();
  const std::int64_t stride = std::int64_t{own_heads_} * mla_.v_head_dim;
  const std::int32_t half = config_.rotary_dim / 2;
  for (const auto& [rows, form, absorbed_row] : decompressed_) {
    const std::int64_t first = rows.first_row;
    float* values = values_.as<float>() + first * stride;
    RETURN_IF_ERROR(prefill_->Begin(
        {.slot = rows.slot, .num_rows = rows.num_rows, .first_position = rows.first_position},
        q_.as<float>() + first * q_stride + own_q, q_stride, step.cos + first * half,
        step.sin + first * half, stream));
    if (form == MlaForm::kChunk) {
      ASSIGN_OR_RETURN(const float* lse, attention_.MergedLse(num_absorbed_, stream));
      RETURN_IF_ERROR(prefill_->AddPart(values, stride,
                                        lse + absorbed_row * attention_.merged_lse_stride(),
                                        attention_.merged_lse_stride(), stream));
    } else {
      RETURN_IF_ERROR(prefill_->AddContext(layer, weights, step.slots, stream));
    }
    RETURN_IF_ERROR(prefill_->AddChunk(layer, weights, step.slots, stream));
    RETURN_IF_ERROR(prefill_->Finish(values, stride, stream));
  }
  return absl::OkStatus();
}

absl::Status MlaLayer::Run(std::int32_t layer, const DecoderLayerWeights& weights,
                           const AttentionStep& step, const float* normed, const float* residual,
                           float* x, kernels::Stream& stream) {
  RETURN_IF_ERROR(ProjectQueries(weights.mla, step, normed, stream));
  RETURN_IF_ERROR(AppendLatent(layer, weights.mla, step, normed, stream));
  Values values{values_.as<float>(), std::int64_t{own_heads_} * mla_.v_head_dim};
  if (num_absorbed_ > 0) {
    ASSIGN_OR_RETURN(values, AttendAbsorbed(layer, weights.mla, step, stream));
  }
  if (!decompressed_.empty()) {
    RETURN_IF_ERROR(AttendDecompressed(layer, weights.mla, step, stream));
  }
  return kernels::Linear({.x = values.data,
                          .weight = &weights.o,
                          .bias = weights.o_bias.data(),
                          .residual = residual,
                          .y = x,
                          .num_rows = step.num_rows,
                          .x_stride = values.stride,
                          .y_stride = config_.hidden_size},
                         stream);
}

}  // namespace weft
