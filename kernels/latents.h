#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/dtype.h"

namespace weft::kernels {

// out[row][head] = in[row][head], `size` floats each, between rows of different widths.
struct CopyColumnsParams {
  const float* in;
  float* out;
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t size;
  std::int64_t in_row_stride;
  std::int64_t in_head_stride;  // 0: the same for every head
  std::int64_t out_row_stride;
  std::int64_t out_head_stride;
};

absl::Status CopyColumns(const CopyColumnsParams& params, Stream& stream);

// Reads back, as fp32 rows, what KvAppend() stored of a sequence's local entries
// [begin, begin + num_tokens) in a cache of one KV head (latents).
struct ReadLatentsParams {
  const void* k_blocks;             // as in GqaAttentionParams, num_kv_heads = 1
  const std::int32_t* block_table;  // of the sequence
  float* out;                       // [num_tokens, head_dim]
  std::int64_t begin;
  std::int32_t num_tokens;
  std::int32_t head_dim;
  std::int32_t block_tokens_per_rank;
  DType kv_dtype;
};

absl::Status ReadLatents(const ReadLatentsParams& params, Stream& stream);

}  // namespace weft::kernels
