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
#include "worker/model/step_arrays.h"
#include "worker/model/step_rows.h"

namespace weft {

// What is the same for the attention of all layers of a step.
struct AttentionStep {
  const StepRows& rows;
  const SlotTable& slots;
  const StepArrays& arrays;  // of both
  // What kernels are launched for: those of `rows`, and on devices some that are nobody's.
  std::int32_t num_rows;
  std::int32_t num_owned;
  const float* cos;  // [num_rows, rotary_dim / 2]
  const float* sin;
  const float* owned_cos;  // [owned rows, rotary_dim / 2]
  const float* owned_sin;
};

// Rows that attend together, and the local entries that each sees; for kernels.
struct VisibleRows {
  std::int32_t num_rows;
  const std::int32_t* slot;           // [num_rows]
  const std::int32_t* first_visible;  // [num_rows]
  const std::int32_t* visible_len;    // [num_rows]
};

// What attention is between the projections, for every family: append at owned positions, attend to
// what this rank holds, exchange and merge. Allocates nothing after Create(). One thread.
class PagedAttention {
 public:
  // `config`, `cache` and `dcp` outlive this.
  static absl::StatusOr<PagedAttention> Create(const ModelConfig& config, const ShardLayout& layout,
                                               std::int32_t max_rows, DcpExchange exchange,
                                               bool round_to_bfloat16, KvCache& cache,
                                               Communicator& dcp, kernels::Stream& stream);

  // Where to write the queries that this rank projects: [num_rows, projected heads, head_dim],
  // query_stride() floats from row to row.
  float* Queries(std::int32_t num_rows) const { return dcp_attention_.Queries(num_rows); }
  std::int64_t query_stride() const { return dcp_attention_.query_stride(); }

  // The rows of `x`, [num_rows, hidden], whose K and V this rank stores.
  absl::StatusOr<const float*> OwnedRows(const AttentionStep& step, const float* x,
                                         kernels::Stream& stream);

  // Stores K and V of the owned rows, [owned rows, kv heads, head_dim], `kv_stride` floats from row
  // to row; `v` is null for a latent, which holds the values.
  absl::Status Append(std::int32_t layer, const AttentionStep& step, const float* k, const float* v,
                      std::int64_t kv_stride, kernels::Stream& stream);

  // Attention of the DCP group's queries to what this rank holds, [num_rows, group heads,
  // value_dim]. That is Partial() if MergedDim() is value_dim; else it has yet to be brought there.
  absl::StatusOr<const float*> Attend(std::int32_t layer, const AttentionStep& step,
                                      kernels::Stream& stream);
  // The same of some rows, whose queries are in Queries(rows.num_rows).
  absl::StatusOr<const float*> Attend(std::int32_t layer, const VisibleRows& rows,
                                      const StepArrays& arrays, kernels::Stream& stream);
  float* Partial() const { return dcp_attention_.PartialOutput(); }  // [rows, heads, MergedDim()]

  // Partial() of all ranks, for this rank's heads: [num_rows, own heads, MergedDim()],
  // merged_stride() floats from row to row, valid until the next call.
  absl::StatusOr<const float*> Merge(std::int32_t num_rows, kernels::Stream& stream) {
    return dcp_attention_.Merge(num_rows, stream);
  }
  std::int64_t merged_stride() const { return dcp_attention_.merged_stride(); }
  // After Merge(): the log-sum-exp of all that this rank's heads attended to, [num_rows, heads],
  // merged_lse_stride() floats from row to row.
  absl::StatusOr<const float*> MergedLse(std::int32_t num_rows, kernels::Stream& stream) {
    return dcp_attention_.MergedLse(num_rows, stream);
  }
  std::int64_t merged_lse_stride() const { return dcp_attention_.merged_lse_stride(); }

  std::int64_t workspace_bytes() const;

 private:
  PagedAttention(const ModelConfig& config, const ShardLayout& layout, bool round_to_bfloat16,
                 KvCache& cache, DcpAttention dcp_attention);

  const ModelConfig* config_;
  KvCache* cache_;
  DcpAttention dcp_attention_;
  IndexRange group_heads_;
  IndexRange kv_heads_;
  std::int32_t q_per_kv_;
  std::int32_t block_tokens_per_rank_;
  bool owns_all_;
  bool round_to_bfloat16_;
  kernels::Buffer owned_x_;   // [owned rows, hidden]
  kernels::Buffer attended_;  // [rows, group heads, value_dim]; empty where that is Partial()
  kernels::Buffer workspace_;
};

}  // namespace weft
