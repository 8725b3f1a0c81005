#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "worker/model/kv_cache.h"
#include "worker/model/shard_layout.h"

namespace weft {

// A sequence's KV on one rank.
struct KvBlocks {
  const KvCache& cache;
  const ShardLayout& layout;
  absl::Span<const std::int32_t> table;  // block ids, by ShardLayout::BlockIndex()
};

// Bytes of one position of `num_heads` KV heads in one layer, as they travel.
std::int64_t KvRowBytes(const KvCacheShape& shape, std::int32_t num_heads);

// Positions in [first, end) that both own.
std::int64_t CountKvRows(const ShardLayout& a, const ShardLayout& b, std::int64_t first,
                         std::int64_t end);

// Which rows of which heads a message carries.
struct KvRowRange {
  std::int32_t layer = 0;
  IndexRange heads;  // of the model
  std::int64_t first_position = 0;
  std::int64_t end_position = 0;
  friend bool operator==(const KvRowRange&, const KvRowRange&) = default;
};

// Rows travel in the order of their positions; where 16 of them are a tile of K on both sides they
// travel as the tile they are. Both functions give the bytes packed or scattered.

// Packs rows that `peer` owns, too, from range.first_position on, until range.end_position or `out`
// is full: 16 rows fit, or it does not get on. `range.end_position` becomes where it stopped.
std::int64_t PackKvRows(const KvBlocks& from, const ShardLayout& peer, KvRowRange& range,
                        absl::Span<std::byte> out);

// The other side. `rows` has CountKvRows() rows exactly, and `range` is what `to` holds.
void ScatterKvRows(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
                   absl::Span<const std::byte> rows);

}  // namespace weft
