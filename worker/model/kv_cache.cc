#include "worker/model/kv_cache.h"

#include <utility>

#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<KvCache> KvCache::Create(const KvCacheShape& shape, std::int32_t num_blocks) {
  KvCache cache;
  cache.shape_ = shape;
  cache.num_blocks_ = num_blocks;
  cache.plane_bytes_ = shape.BytesPerBlock() / (2 * shape.num_layers) * num_blocks;
  ASSIGN_OR_RETURN(cache.buffer_,
                   kernels::Buffer::Allocate(cache.plane_bytes_ * 2 * shape.num_layers));
  return cache;
}

}  // namespace weft
