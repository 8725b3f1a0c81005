#include "kernels/latents.h"

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/launch.h"

namespace weft::kernels {

absl::Status CopyColumns(const CopyColumnsParams& params, Stream& stream) {
  const CopyColumnsParams& p = params;
  ParallelRows(PoolOf(stream), p.num_rows, std::int64_t{p.num_heads} * p.size,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   for (std::int64_t head = 0; head < p.num_heads; ++head) {
                     std::copy_n(p.in + row * p.in_row_stride + head * p.in_head_stride, p.size,
                                 p.out + row * p.out_row_stride + head * p.out_head_stride);
                   }
                 }
               });
  return absl::OkStatus();
}

absl::Status ReadLatents(const ReadLatentsParams& params, Stream& stream) {
  const ReadLatentsParams& p = params;
  const std::int64_t block_elements = std::int64_t{p.block_tokens_per_rank} * p.head_dim;
  ParallelRows(PoolOf(stream), p.num_tokens, std::int64_t{4} * p.head_dim,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t entry = p.begin + i;
                   const auto token = static_cast<std::int32_t>(entry % p.block_tokens_per_rank);
                   const std::int64_t block =
                       p.block_table[entry / p.block_tokens_per_rank] * block_elements;
                   float* out = p.out + i * p.head_dim;
                   for (std::int32_t dim = 0; dim < p.head_dim; ++dim) {
                     const std::int64_t at =
                         block + KIndex(token, dim, p.head_dim, p.block_tokens_per_rank);
                     out[dim] = LoadElement(p.k_blocks, at, p.kv_dtype);
                   }
                 }
               });
  return absl::OkStatus();
}

}  // namespace weft::kernels
