#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/dtype.h"

namespace weft {

// Shape of what one rank stores per layer.
struct KvCacheShape {
  std::int32_t num_layers = 0;
  std::int32_t num_kv_heads = 0;  // that this rank holds
  std::int32_t head_dim = 0;
  std::int32_t value_dim = 0;              // 0: K is a latent that holds the values, too
  std::int32_t block_tokens_per_rank = 0;  // B
  DType dtype = DType::kFloat32;

  // K and V of one token this rank owns, all layers.
  std::int64_t BytesPerLocalToken() const {
    return num_layers * (PlaneBytesPerToken(head_dim) + PlaneBytesPerToken(value_dim));
  }
  std::int64_t BytesPerBlock() const { return BytesPerLocalToken() * block_tokens_per_rank; }

  // K or V of one token in one layer.
  std::int64_t PlaneBytesPerToken(std::int32_t dim) const {
    return std::int64_t{num_kv_heads} * dim * DTypeBytes(dtype);
  }
};

// This rank's share of the group's KV: `num_blocks` blocks per layer for K and for V, laid out as
// kernels/attention.h says, or kernels/cuda/kv_append.h. Pages come on first use; blocks that were
// used last are used first.
class KvCache {
 public:
  // Where kernels of `stream` read it. RESOURCE_EXHAUSTED with the size when it cannot be had.
  static absl::StatusOr<KvCache> Create(const KvCacheShape& shape, std::int32_t num_blocks,
                                        kernels::Stream& stream);

  const KvCacheShape& shape() const { return shape_; }
  std::int32_t num_blocks() const { return num_blocks_; }
  std::int64_t size_bytes() const { return buffer_.size_bytes(); }
  void* k_blocks(std::int32_t layer) const { return buffer_.data() + layer * layer_bytes_; }
  // Null for a latent.
  void* v_blocks(std::int32_t layer) const {
    return shape_.value_dim == 0 ? nullptr : buffer_.data() + layer * layer_bytes_ + k_bytes_;
  }

 private:
  KvCacheShape shape_;
  std::int32_t num_blocks_ = 0;
  std::int64_t layer_bytes_ = 0;
  std::int64_t k_bytes_ = 0;  // of a layer
  kernels::Buffer buffer_;
};

}  // namespace weft
