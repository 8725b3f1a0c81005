#include "worker/model/paged_attention.h"

#include <utility>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "server/base/status_macros.h"

namespace weft {

PagedAttention::PagedAttention(const ModelConfig& config, const ShardLayout& layout,
                               bool round_to_bfloat16, KvCache& cache, DcpAttention dcp_attention)
    : config_(&config),
      cache_(&cache),
      dcp_attention_(std::move(dcp_attention)),
      group_heads_(layout.GroupQHeads()),
      kv_heads_(layout.GroupKvHeads()),
      q_per_kv_(layout.q_per_kv()),
      block_tokens_per_rank_(layout.block_tokens_per_rank()),
      owns_all_(layout.decode_context_parallel_size() == 1),
      round_to_bfloat16_(round_to_bfloat16) {}

absl::StatusOr<PagedAttention> PagedAttention::Create(const ModelConfig& config,
                                                      const ShardLayout& layout,
                                                      std::int32_t max_rows, DcpExchange exchange,
                                                      bool round_to_bfloat16, KvCache& cache,
                                                      Communicator& dcp, kernels::Stream& stream) {
  const std::int32_t merged_dim = MergedDim(config, layout);
  ASSIGN_OR_RETURN(
      DcpAttention dcp_attention,
      DcpAttention::Create(layout, config.head_dim, merged_dim, max_rows, exchange, dcp, stream));
  PagedAttention attention(config, layout, round_to_bfloat16, cache, std::move(dcp_attention));
  ASSIGN_OR_RETURN(attention.owned_x_,
                   kernels::Buffer::Allocate(std::int64_t{max_rows} * config.hidden_size *
                                                 static_cast<std::int64_t>(sizeof(float)),
                                             stream));
  if (merged_dim < config.value_dim) {
    ASSIGN_OR_RETURN(
        attention.attended_,
        kernels::Buffer::Allocate(std::int64_t{max_rows} * attention.group_heads_.size() *
                                      config.value_dim * static_cast<std::int64_t>(sizeof(float)),
                                  stream));
  }
  ASSIGN_OR_RETURN(attention.workspace_,
                   kernels::Buffer::Allocate(kernels::GqaAttentionWorkspaceBytes(
                                                 max_rows, attention.group_heads_.size(),
                                                 config.head_dim, config.value_dim, stream),
                                             stream));
  return attention;
}

std::int64_t PagedAttention::workspace_bytes() const {
  return dcp_attention_.workspace_bytes() + owned_x_.size_bytes() + attended_.size_bytes() +
         workspace_.size_bytes();
}

absl::StatusOr<const float*> PagedAttention::OwnedRows(const AttentionStep& step, const float* x,
                                                       kernels::Stream& stream) {
  if (owns_all_) return x;
  RETURN_IF_ERROR(kernels::GatherRows({.in = x,
                                       .index = step.arrays.owned_row(),
                                       .out = owned_x_.as<float>(),
                                       .num_rows = step.num_owned,
                                       .size = config_->hidden_size},
                                      stream));
  return owned_x_.as<float>();
}

absl::Status PagedAttention::Append(std::int32_t layer, const AttentionStep& step, const float* k,
                                    const float* v, std::int64_t kv_stride,
                                    kernels::Stream& stream) {
  return kernels::KvAppend({.k = k,
                            .v = v,
                            .slots = step.arrays.owned_kv_slot(),
                            .k_blocks = cache_->k_blocks(layer),
                            .v_blocks = cache_->v_blocks(layer),
                            .num_rows = step.num_owned,
                            .num_kv_heads = kv_heads_.size(),
                            .head_dim = config_->head_dim,
                            .block_tokens_per_rank = block_tokens_per_rank_,
                            .kv_stride = kv_stride,
                            .kv_dtype = cache_->shape().dtype},
                           stream);
}

absl::StatusOr<const float*> PagedAttention::Attend(std::int32_t layer, const AttentionStep& step,
                                                    kernels::Stream& stream) {
  const StepArrays& arrays = step.arrays;
  const bool window = config_->HasWindow(layer);
  return Attend(layer,
                {.num_rows = step.num_rows,
                 .slot = arrays.slot(),
                 .first_visible = window ? arrays.first_in_window() : arrays.first_visible(),
                 .visible_len = arrays.visible_len()},
                arrays, stream);
}

absl::StatusOr<const float*> PagedAttention::Attend(std::int32_t layer, const VisibleRows& rows,
                                                    const StepArrays& arrays,
                                                    kernels::Stream& stream) {
  const std::int32_t num_rows = rows.num_rows;
  ASSIGN_OR_RETURN(const float* group_q, dcp_attention_.GatherQueries(num_rows, stream));
  float* out = attended_.size_bytes() > 0 ? attended_.as<float>() : Partial();
  RETURN_IF_ERROR(kernels::GqaAttention({.q = group_q,
                                         .k_blocks = cache_->k_blocks(layer),
                                         .v_blocks = cache_->v_blocks(layer),
                                         .block_table = arrays.block_table(),
                                         .row_slot = rows.slot,
                                         .first_visible = rows.first_visible,
                                         .visible_len = rows.visible_len,
                                         .out = out,
                                         .lse = dcp_attention_.PartialLse(),
                                         .num_rows = num_rows,
                                         .num_q_heads = group_heads_.size(),
                                         .num_kv_heads = kv_heads_.size(),
                                         .first_q_head = group_heads_.begin,
                                         .first_kv_head = kv_heads_.begin,
                                         .q_per_kv = q_per_kv_,
                                         .head_dim = config_->head_dim,
                                         .value_dim = config_->value_dim,
                                         .block_tokens_per_rank = block_tokens_per_rank_,
                                         .max_blocks_per_seq = arrays.max_blocks_per_seq(),
                                         .kv_dtype = cache_->shape().dtype,
                                         .scale = config_->attention_scale,
                                         .round_to_bfloat16 = round_to_bfloat16_},
                                        workspace_.data(), stream));
  return out;
}

}  // namespace weft
