#include "worker/model/kv_cache.h"

#include <utility>

#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<KvCache> KvCache::Create(const KvCacheShape& shape, std::int32_t num_blocks,
                                        kernels::Stream& stream) {
  KvCache cache;
  cache.shape_ = shape;
  cache.num_blocks_ = num_blocks;
  const std::int64_t tokens = std::int64_t{num_blocks} * shape.block_tokens_per_rank;
  cache.k_bytes_ = tokens * shape.PlaneBytesPerToken(shape.head_dim);
  cache.layer_bytes_ = cache.k_bytes_ + tokens * shape.PlaneBytesPerToken(shape.value_dim);
  ASSIGN_OR_RETURN(cache.buffer_,
                   kernels::Buffer::Allocate(cache.layer_bytes_ * shape.num_layers, stream));
  return cache;
}

}  // namespace weft
