#include "worker/model/mla_prefill.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/latents.h"
#include "kernels/lse_merge.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

constexpr std::int32_t kTileTokens = 512;
constexpr std::int64_t kFloat = sizeof(float);

// The most entries of one rank in a tile: its share of the keys before the rows, or as many of the
// rows' own as runs of the interleave put there.
std::int32_t MaxEntriesOfRank(const ShardLayout& layout, std::int32_t max_rows) {
  const std::int32_t share = CeilDiv(kTileTokens, layout.decode_context_parallel_size());
  return std::max(share, std::min(kTileTokens, max_rows));
}

}  // namespace

MlaCost CostOf(MlaForm form, const ModelConfig& config, const ShardLayout& layout,
               std::int64_t num_rows, std::int64_t context, DcpExchange exchange) {
  const MlaConfig& mla = *config.mla;
  const auto rows = static_cast<double>(num_rows);
  const auto before = static_cast<double>(context);
  const double inside = rows * (rows + 1) / 2;  // pairs of a row and a key of the same step
  const double absorbed = 2.0 * (config.head_dim + mla.kv_lora_rank);
  const double decompressed = 2.0 * (mla.qk_head_dim() + mla.v_head_dim);
  // Of one head: queries of a row into the latent's space and values out of it, or K and V out of
  // a latent.
  const double between = 2.0 * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim);
  const double n = layout.decode_context_parallel_size();
  const double padded = layout.PaddedQHeads();
  const double latents = (n - 1) / n * config.head_dim * kFloat;  // of one key
  const double absorbed_bytes =
      (n - 1) * rows * padded * kFloat *
      ((layout.GathersQueries() ? config.head_dim : 0) + MergedDim(config, layout) +
       (exchange == DcpExchange::kA2a ? 1 : n));
  switch (form) {
    case MlaForm::kAbsorbed:
      return {padded * (rows * between + (rows * before + inside) * absorbed), absorbed_bytes};
    case MlaForm::kChunk:
      return {padded * (2 * rows * between + rows * before * absorbed + inside * decompressed),
              absorbed_bytes + rows * latents};
    case MlaForm::kWhole:
      return {padded * ((before + rows) * between + (rows * before + inside) * decompressed),
              (before + rows) * latents};
  }
  CheckFailed(__FILE__, __LINE__, "form", "unreachable");
}

std::int64_t MlaPrefill::MaxCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                            std::int32_t max_rows) {
  return std::int64_t{layout.decode_context_parallel_size()} * MaxEntriesOfRank(layout, max_rows) *
         config.head_dim * kFloat;
}

MlaPrefill::MlaPrefill(const ModelConfig& config, const ShardLayout& layout, KvCache& cache,
                       Communicator& dcp)
    : config_(&config),
      layout_(layout),
      cache_(&cache),
      dcp_(&dcp),
      heads_(layout.QHeads().size()),
      head_dim_(DecompressedDim(*config.mla)) {}

absl::StatusOr<MlaPrefill> MlaPrefill::Create(const ModelConfig& config, const ShardLayout& layout,
                                              std::int32_t max_rows, KvCache& cache,
                                              Communicator& dcp, kernels::Stream& stream) {
  MlaPrefill p(config, layout, cache, dcp);
  const std::int32_t n = layout.decode_context_parallel_size();
  p.tile_.begin.resize(n);
  p.tile_.size.resize(n);
  p.zeros_.resize(max_rows);
  p.visible_len_.resize(max_rows);
  p.slots_.resize(kTileTokens);
  std::iota(p.slots_.begin(), p.slots_.end(), 0);
  p.products_.resize(p.heads_);
  p.lse_floats_ = std::int64_t{max_rows} * p.heads_;
  p.part_floats_ = p.lse_floats_ * p.head_dim_;
  const std::int64_t tile = std::int64_t{kTileTokens} * p.heads_ * p.head_dim_;
  using kernels::Buffer;
  ASSIGN_OR_RETURN(p.q_, Buffer::Allocate(p.part_floats_ * kFloat));
  if (n > 1) {
    ASSIGN_OR_RETURN(p.gathered_,
                     dcp.Allocate(MaxCollectiveBytes(config, layout, max_rows), stream));
  }
  ASSIGN_OR_RETURN(p.latents_, Buffer::Allocate(kTileTokens * config.head_dim * kFloat));
  ASSIGN_OR_RETURN(p.kv_, Buffer::Allocate(2 * tile * kFloat));
  ASSIGN_OR_RETURN(p.blocks_, Buffer::Allocate(2 * tile * kFloat));
  ASSIGN_OR_RETURN(p.parts_, Buffer::Allocate(3 * p.part_floats_ * kFloat));
  ASSIGN_OR_RETURN(p.lse_, Buffer::Allocate(3 * p.lse_floats_ * kFloat));
  ASSIGN_OR_RETURN(p.workspace_, Buffer::Allocate(kernels::GqaAttentionWorkspaceBytes(
                                     max_rows, p.heads_, p.head_dim_, p.head_dim_, stream)));
  return p;
}

std::int64_t MlaPrefill::workspace_bytes() const {
  std::int64_t bytes = 0;
  for (const kernels::Buffer* buffer :
       {&q_, &gathered_, &latents_, &kv_, &blocks_, &parts_, &lse_, &workspace_}) {
    bytes += buffer->size_bytes();
  }
  return bytes;
}

absl::Status MlaPrefill::Begin(const Rows& rows, const float* q, std::int64_t q_stride,
                               const float* cos, const float* sin, kernels::Stream& stream) {
  const MlaConfig& mla = *config_->mla;
  rows_ = rows;
  num_parts_ = 0;
  const std::int64_t stride = std::int64_t{heads_} * head_dim_;
  RETURN_IF_ERROR(kernels::CopyColumns({.in = q,
                                        .out = q_.as<float>(),
                                        .num_rows = rows.num_rows,
                                        .num_heads = heads_,
                                        .size = mla.qk_head_dim(),
                                        .in_row_stride = q_stride,
                                        .in_head_stride = mla.qk_head_dim(),
                                        .out_row_stride = stride,
                                        .out_head_stride = head_dim_},
                                       stream));
  return kernels::Rope({.x = q_.as<float>() + mla.qk_nope_head_dim,
                        .cos = cos,
                        .sin = sin,
                        .num_rows = rows.num_rows,
                        .num_heads = heads_,
                        .head_dim = mla.qk_rope_head_dim,
                        .row_stride = stride,
                        .head_stride = head_dim_},
                       stream);
}

absl::Status MlaPrefill::MergeParts(kernels::Stream& stream) {
  const auto [merged, added, free] = part_;
  if (num_parts_++ == 0) {
    part_ = {added, merged, free};
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(kernels::LseMerge({.parts = Part(merged),
                                     .lse = Lse(merged),
                                     .part_stride = (added - merged) * part_floats_,
                                     .lse_stride = (added - merged) * lse_floats_,
                                     .out = Part(free),
                                     .merged_lse = Lse(free),
                                     .num_parts = 2,
                                     .num_rows = rows_.num_rows,
                                     .num_heads = heads_,
                                     .head_dim = head_dim_},
                                    stream));
  part_ = {free, added, merged};
  return absl::OkStatus();
}

absl::Status MlaPrefill::AddPart(const float* values, std::int64_t value_stride, const float* lse,
                                 std::int64_t lse_stride, kernels::Stream& stream) {
  const std::int32_t v_dim = config_->mla->v_head_dim;
  RETURN_IF_ERROR(kernels::CopyColumns({.in = values,
                                        .out = Part(part_[1]),
                                        .num_rows = rows_.num_rows,
                                        .num_heads = heads_,
                                        .size = v_dim,
                                        .in_row_stride = value_stride,
                                        .in_head_stride = v_dim,
                                        .out_row_stride = std::int64_t{heads_} * head_dim_,
                                        .out_head_stride = head_dim_},
                                       stream));
  RETURN_IF_ERROR(kernels::CopyColumns({.in = lse,
                                        .out = Lse(part_[1]),
                                        .num_rows = rows_.num_rows,
                                        .num_heads = 1,
                                        .size = heads_,
                                        .in_row_stride = lse_stride,
                                        .in_head_stride = 0,
                                        .out_row_stride = heads_,
                                        .out_head_stride = 0},
                                       stream));
  return MergeParts(stream);
}

absl::Status MlaPrefill::AddContext(std::int32_t layer, const MlaWeights& weights,
                                    const SlotTable& slots, kernels::Stream& stream) {
  const std::int32_t n = layout_.decode_context_parallel_size();
  const std::int64_t step = std::max(1, kTileTokens / n);
  // Every row sees all of these keys: their order does not matter, and equal shares of all ranks
  // travel together.
  const std::int64_t longest = layout_.LocalLength(rows_.first_position, 0);
  for (std::int64_t at = 0; at < longest; at += step) {
    tile_.by_position = false;
    tile_.num_keys = 0;
    for (std::int32_t r = 0; r < n; ++r) {
      const std::int64_t end = std::min(at + step, layout_.LocalLength(rows_.first_position, r));
      tile_.begin[r] = at;
      tile_.size[r] = static_cast<std::int32_t>(std::max<std::int64_t>(0, end - at));
      tile_.num_keys += tile_.size[r];
    }
    std::fill_n(visible_len_.begin(), rows_.num_rows, tile_.num_keys);
    RETURN_IF_ERROR(AttendTile(layer, weights, slots, stream));
  }
  return absl::OkStatus();
}

absl::Status MlaPrefill::AddChunk(std::int32_t layer, const MlaWeights& weights,
                                  const SlotTable& slots, kernels::Stream& stream) {
  for (std::int32_t at = 0; at < rows_.num_rows; at += kTileTokens) {
    tile_.by_position = true;
    tile_.num_keys = std::min(kTileTokens, rows_.num_rows - at);
    tile_.first_position = rows_.first_position + at;
    for (std::int32_t r = 0; r < layout_.decode_context_parallel_size(); ++r) {
      tile_.begin[r] = layout_.LocalLength(tile_.first_position, r);
      tile_.size[r] = static_cast<std::int32_t>(
          layout_.LocalLength(tile_.first_position + tile_.num_keys, r) - tile_.begin[r]);
    }
    for (std::int32_t row = 0; row < rows_.num_rows; ++row) {
      visible_len_[row] = std::clamp(row + 1 - at, 0, tile_.num_keys);
    }
    RETURN_IF_ERROR(AttendTile(layer, weights, slots, stream));
  }
  return absl::OkStatus();
}

absl::Status MlaPrefill::GatherLatents(std::int32_t layer, const SlotTable& slots,
                                       kernels::Stream& stream) {
  const std::int32_t me = layout_.dcp_rank();
  const std::int64_t dim = config_->head_dim;
  const std::int64_t entries = *std::max_element(tile_.size.begin(), tile_.size.end());
  const bool alone = layout_.decode_context_parallel_size() == 1;
  float* const all = alone ? latents_.as<float>() : gathered_.as<float>();
  float* const own = all + me * entries * dim;
  RETURN_IF_ERROR(kernels::ReadLatents({.k_blocks = cache_->k_blocks(layer),
                                        .block_table = slots.BlocksOf(rows_.slot),
                                        .out = own,
                                        .begin = tile_.begin[me],
                                        .num_tokens = tile_.size[me],
                                        .head_dim = config_->head_dim,
                                        .block_tokens_per_rank = layout_.block_tokens_per_rank(),
                                        .kv_dtype = cache_->shape().dtype},
                                       stream));
  if (alone) return absl::OkStatus();
  std::fill(own + tile_.size[me] * dim, own + entries * dim, 0.0F);
  RETURN_IF_ERROR(dcp_->AllGather(own, all, entries * dim * kFloat, stream));
  float* next = latents_.as<float>();
  for (std::size_t r = 0; r < tile_.size.size(); ++r) {
    const float* from = all + static_cast<std::int64_t>(r) * entries * dim;
    if (!tile_.by_position) {
      next = std::copy_n(from, tile_.size[r] * dim, next);
      continue;
    }
    for (std::int64_t i = 0; i < tile_.size[r]; ++i) {
      const std::int64_t position =
          layout_.PositionOf(tile_.begin[r] + i, static_cast<std::int32_t>(r));
      std::copy_n(from + i * dim, dim,
                  latents_.as<float>() + (position - tile_.first_position) * dim);
    }
  }
  return absl::OkStatus();
}

absl::Status MlaPrefill::Decompress(const MlaWeights& weights, kernels::Stream& stream) {
  const MlaConfig& mla = *config_->mla;
  const std::int64_t stride = std::int64_t{heads_} * head_dim_;
  const float* latents = latents_.as<float>();
  float* const k = kv_.as<float>();
  float* const v = k + kTileTokens * stride;
  const auto project = [&](const kernels::PackedMatrix* heads, float* out) {
    for (std::int32_t head = 0; head < heads_; ++head) {
      products_[head] = {.x = latents,
                         .weight = heads + head,
                         .bias = nullptr,
                         .residual = nullptr,
                         .y = out + std::int64_t{head} * head_dim_,
                         .num_rows = tile_.num_keys,
                         .x_stride = config_->head_dim,
                         .y_stride = stride};
    }
    return kernels::GroupedLinear(products_, stream);
  };
  RETURN_IF_ERROR(project(weights.k_from_latent.begin(), k));
  // All of the DCP group's W_UV where values are projected before they are merged.
  const auto values = static_cast<std::int32_t>(weights.v_up.size());
  const std::int32_t first =
      values > heads_ ? layout_.QHeads().begin - layout_.GroupQHeads().begin : 0;
  RETURN_IF_ERROR(project(weights.v_up.begin() + first, v));
  RETURN_IF_ERROR(kernels::CopyColumns({.in = latents + mla.kv_lora_rank,
                                        .out = k + mla.qk_nope_head_dim,
                                        .num_rows = tile_.num_keys,
                                        .num_heads = heads_,
                                        .size = mla.qk_rope_head_dim,
                                        .in_row_stride = config_->head_dim,
                                        .in_head_stride = 0,
                                        .out_row_stride = stride,
                                        .out_head_stride = head_dim_},
                                       stream));
  return kernels::KvAppend({.k = k,
                            .v = v,
                            .slots = slots_.data(),
                            .k_blocks = blocks_.data(),
                            .v_blocks = blocks_.as<float>() + kTileTokens * stride,
                            .num_rows = tile_.num_keys,
                            .num_kv_heads = heads_,
                            .head_dim = head_dim_,
                            .block_tokens_per_rank = kTileTokens,
                            .kv_stride = stride,
                            .kv_dtype = DType::kFloat32},
                           stream);
}

absl::Status MlaPrefill::AttendTile(std::int32_t layer, const MlaWeights& weights,
                                    const SlotTable& slots, kernels::Stream& stream) {
  RETURN_IF_ERROR(GatherLatents(layer, slots, stream));
  RETURN_IF_ERROR(Decompress(weights, stream));
  const std::int64_t tile = std::int64_t{kTileTokens} * heads_ * head_dim_;
  RETURN_IF_ERROR(kernels::GqaAttention({.q = q_.as<float>(),
                                         .k_blocks = blocks_.data(),
                                         .v_blocks = blocks_.as<float>() + tile,
                                         .block_table = zeros_.data(),
                                         .row_slot = zeros_.data(),
                                         .first_visible = zeros_.data(),
                                         .visible_len = visible_len_.data(),
                                         .out = Part(part_[1]),
                                         .lse = Lse(part_[1]),
                                         .num_rows = rows_.num_rows,
                                         .num_q_heads = heads_,
                                         .num_kv_heads = heads_,
                                         .first_q_head = 0,
                                         .first_kv_head = 0,
                                         .q_per_kv = 1,
                                         .head_dim = head_dim_,
                                         .value_dim = head_dim_,
                                         .block_tokens_per_rank = kTileTokens,
                                         .max_blocks_per_seq = 1,
                                         .kv_dtype = DType::kFloat32,
                                         .scale = config_->attention_scale},
                                        workspace_.data(), stream));
  return MergeParts(stream);
}

absl::Status MlaPrefill::Finish(float* values, std::int64_t value_stride, kernels::Stream& stream) {
  const std::int32_t v_dim = config_->mla->v_head_dim;
  return kernels::CopyColumns({.in = Part(part_[0]),
                               .out = values,
                               .num_rows = rows_.num_rows,
                               .num_heads = heads_,
                               .size = v_dim,
                               .in_row_stride = std::int64_t{heads_} * head_dim_,
                               .in_head_stride = head_dim_,
                               .out_row_stride = value_stride,
                               .out_head_stride = v_dim},
                              stream);
}

}  // namespace weft
