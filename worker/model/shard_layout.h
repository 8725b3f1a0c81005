#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "server/base/check.h"

namespace weft {

// A half-open range [begin, end).
struct IndexRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t size() const { return end - begin; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};

// What the user asks for; absent values get the block rule's defaults.
struct LayoutOptions {
  std::int32_t tensor_parallel_size = 1;          // T
  std::int32_t decode_context_parallel_size = 1;  // N
  std::optional<std::int32_t> block_size;         // V, tokens over the DCP group
  std::optional<std::int32_t> interleave;         // I, --cp-kv-cache-interleave-size
  std::int32_t min_block_size = 128;              // least default V: 128 on the CPU, 256 on CUDA
  bool replicate_query = false;                   // --dcp-replicate-query
};

// The head counts that a layout divides.
struct HeadCounts {
  std::int32_t num_q_heads = 0;   // Hq
  std::int32_t num_kv_heads = 0;  // Hkv, divides Hq
};

// The one geometry (law 1): which rank of a group owns which position, slot, head and slice.
//
// Symbols as in the README: T ranks in a group, N consecutive ranks in a DCP group, blocks of V
// consecutive positions of a sequence over the DCP group, B = V / N of them on one rank,
// interleave I: position p belongs to DCP rank (p / I) % N.
//
// A value; every method is const, allocates nothing and (but for KvCopies()) takes constant time.
// Positions are 64-bit.
class ShardLayout {
 public:
  // `rank` is in [0, T). INVALID_ARGUMENT, saying what is allowed: T % N != 0, T > num_q_heads,
  // V not a multiple of N * I (names the nearest V and I that work), a size below 1.
  static absl::StatusOr<ShardLayout> Create(const LayoutOptions& options, const HeadCounts& heads,
                                            std::int32_t rank);

  std::int32_t tensor_parallel_size() const { return tp_; }
  std::int32_t decode_context_parallel_size() const { return dcp_; }
  std::int32_t rank() const { return rank_; }
  std::int32_t dcp_rank() const { return rank_ % dcp_; }   // within the DCP group
  std::int32_t dcp_group() const { return rank_ / dcp_; }  // which DCP group
  std::int32_t block_size() const { return block_size_; }  // V
  // I; divides B. With N = 1 the one asked for is ignored, and this is the default.
  std::int32_t interleave() const { return interleave_; }
  std::int32_t block_tokens_per_rank() const { return block_size_ / dcp_; }  // B

  // Positions.
  std::int32_t OwnerDcpRank(std::int64_t position) const {
    return static_cast<std::int32_t>((position / interleave_) % dcp_);
  }
  bool Owns(std::int64_t position) const { return OwnerDcpRank(position) == dcp_rank(); }
  // Which block of its sequence holds `position`.
  std::int64_t BlockIndex(std::int64_t position) const { return position / block_size_; }
  // Where in its block's local part an owned position is stored, in [0, B).
  std::int32_t OffsetInBlock(std::int64_t position) const {
    const auto in_block = static_cast<std::int32_t>(position % block_size_);
    return in_block / (dcp_ * interleave_) * interleave_ + in_block % interleave_;
  }
  // L_r: how many of the first `length` positions this rank (or DCP rank `dcp_rank`) owns; also
  // the local index of the first owned position >= length.
  std::int64_t LocalLength(std::int64_t length) const { return LocalLength(length, dcp_rank()); }
  std::int64_t LocalLength(std::int64_t length, std::int32_t dcp_rank) const {
    const std::int64_t stride = static_cast<std::int64_t>(interleave_) * dcp_;
    const std::int64_t base = length / stride * interleave_;
    const std::int64_t rest = length % stride - static_cast<std::int64_t>(dcp_rank) * interleave_;
    return base + std::clamp<std::int64_t>(rest, 0, interleave_);
  }
  // The inverse: the global position of local entry `index` of this rank (or DCP rank).
  std::int64_t PositionOf(std::int64_t index) const { return PositionOf(index, dcp_rank()); }
  std::int64_t PositionOf(std::int64_t index, std::int32_t dcp_rank) const {
    return index / interleave_ * (static_cast<std::int64_t>(dcp_) * interleave_) +
           static_cast<std::int64_t>(dcp_rank) * interleave_ + index % interleave_;
  }

  // Heads. Rank i has query heads [floor(i * Hq / T), floor((i + 1) * Hq / T)).
  IndexRange QHeads() const { return QHeads(rank_); }
  IndexRange QHeads(std::int32_t rank) const { return Slice(num_q_heads_, rank); }
  // Query heads of this rank's DCP group together.
  IndexRange GroupQHeads() const;
  // Query heads that this rank projects itself: its own, or with replicate_query its DCP group's.
  IndexRange ProjectedQHeads() const { return replicate_query_ ? GroupQHeads() : QHeads(); }
  // True when a rank needs queries that it does not project.
  bool GathersQueries() const { return dcp_ > 1 && !replicate_query_; }
  // KV heads that the group's query heads read; every rank of the group stores these.
  IndexRange GroupKvHeads() const;
  std::int32_t q_per_kv() const { return num_q_heads_ / num_kv_heads_; }
  // ceil(Hq / T): per-head messages are padded to this many heads a rank.
  std::int32_t PaddedQHeads() const { return (num_q_heads_ + tp_ - 1) / tp_; }

  // This rank's (or `rank`'s) part of another dimension of `size` (intermediate, vocabulary):
  // [floor(i * size / T), floor((i + 1) * size / T)); may be empty.
  IndexRange Slice(std::int32_t size) const { return Slice(size, rank_); }
  IndexRange Slice(std::int32_t size, std::int32_t rank) const {
    return {static_cast<std::int32_t>(static_cast<std::int64_t>(rank) * size / tp_),
            static_cast<std::int32_t>((static_cast<std::int64_t>(rank) + 1) * size / tp_)};
  }

  // How many times the replica stores one KV entry, summed over heads / Hkv.
  double KvCopies() const;

 private:
  ShardLayout() = default;

  std::int32_t tp_ = 1;
  std::int32_t dcp_ = 1;
  std::int32_t rank_ = 0;
  std::int32_t block_size_ = 1;
  std::int32_t interleave_ = 1;
  std::int32_t num_q_heads_ = 1;
  std::int32_t num_kv_heads_ = 1;
  bool replicate_query_ = false;
};

}  // namespace weft
