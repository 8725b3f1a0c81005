#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/dtype.h"

namespace weft::kernels {

// head_dim is a multiple of 8 up to the first, that of a latent up to the second.
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxLatentDim = 1024;

// Inside a block, a KV head's K and V take block_tokens_per_rank * head_dim elements each. V is
// [token][value_dim]. K is stored for the inner loop of the scores: in tiles of 16 tokens (the last
// one holds what is left), each [head_dim][tokens of the tile]. These two say where a value is;
// who copies KV (transfer) moves token rows by them.
constexpr std::int64_t KIndex(std::int32_t token, std::int32_t dim, std::int32_t head_dim,
                              std::int32_t block_tokens_per_rank) {
  const std::int32_t tile = token / 16 * 16;
  const std::int32_t width = block_tokens_per_rank - tile < 16 ? block_tokens_per_rank - tile : 16;
  return std::int64_t{tile} * head_dim + std::int64_t{dim} * width + (token - tile);
}
constexpr std::int64_t VIndex(std::int32_t token, std::int32_t dim, std::int32_t head_dim) {
  return std::int64_t{token} * head_dim + dim;
}

// Paged attention with grouped queries, or over latents (MLA), over the tokens that this rank
// holds. One kernel serves decode, chunked prefill, several rows a sequence and sliding windows: a
// row sees the local entries [first_visible, visible_len) of its sequence, in local order, which is
// monotone in global position (the KV of the step's own rows is appended before). Shapes are
// row-major, [outer, ..., inner].
struct GqaAttentionParams {
  const float* q;        // [num_rows, num_q_heads, head_dim] fp32
  const void* k_blocks;  // [num_blocks, num_kv_heads, block_tokens_per_rank * head_dim] kv_dtype,
  const void* v_blocks;  // inside as KIndex and VIndex say; null: a token's V is the first
                         // value_dim of its K
  const std::int32_t* block_table;  // [num_slots, max_blocks_per_seq] block ids
  const std::int32_t*
      row_slot;  // [num_rows] which row of block_table; rows of one sequence are adjacent
  const std::int32_t* first_visible;  // [num_rows] local index, 0 but for sliding windows
  const std::int32_t* visible_len;    // [num_rows] end of the local entries the row may see
  float* out;  // [num_rows, num_q_heads, value_dim] softmax-normalized over the local entries; 0
               // if none
  float*
      lse;  // [num_rows, num_q_heads] log-sum-exp of scaled scores, natural logarithm; -inf if none

  std::int32_t num_rows;
  std::int32_t num_q_heads;    // of the DCP group; may be uneven over num_kv_heads
  std::int32_t num_kv_heads;   // that this rank holds
  std::int32_t first_q_head;   // global index; the KV head of local q head i is
  std::int32_t first_kv_head;  //   (first_q_head + i) / q_per_kv - first_kv_head
  std::int32_t q_per_kv;
  std::int32_t head_dim;               // any multiple of 8 up to kMaxHeadDim
  std::int32_t value_dim;              // head_dim, but for a latent: up to it
  std::int32_t block_tokens_per_rank;  // any; multiples of 16 are several times as fast
  std::int32_t max_blocks_per_seq;
  DType kv_dtype;
  float scale;  // usually 1 / sqrt(head_dim)
  // Lets the CPU round q, K, V and the softmax's weights to bfloat16: it does where it
  // HasDotProducts() (device/cpu_target.h), unless K and V are latents.
  bool round_to_bfloat16 = false;
};

// `workspace`: GqaAttentionWorkspaceBytes() bytes, 64-byte aligned. INVALID_ARGUMENT for a head_dim
// or value_dim not listed. The result of a row does not depend on the other rows or on the number
// of threads: keys are taken 64 at a time, and every 512 of them make a part (their bounds are
// absolute local indices) that is computed alone and merged in order. Entries a row may not see are
// never read into its result, whatever they hold. A block is not touched unless some row sees into
// it.
absl::Status GqaAttention(const GqaAttentionParams& params, void* workspace, Stream& stream);

// Scratch that GqaAttention() needs for any batch within these limits, on `stream`.
std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                        std::int32_t head_dim, std::int32_t value_dim,
                                        const Stream& stream);

// Writes K and V of rows this rank owns into their slots (ShardLayout says which),
// rounding to kv_dtype (to nearest even; beyond float16 becomes infinite).
struct KvAppendParams {
  const float* k;  // [num_rows, num_kv_heads, head_dim], kv_stride floats from row to row
  const float* v;  // as k; null for latents
  const std::int64_t* slots;  // [num_rows] block id * block_tokens_per_rank + offset in the block
  void* k_blocks;             // as in GqaAttentionParams
  void* v_blocks;
  std::int32_t num_rows;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t block_tokens_per_rank;
  std::int64_t kv_stride;
  DType kv_dtype;
};

absl::Status KvAppend(const KvAppendParams& params, Stream& stream);

}  // namespace weft::kernels
