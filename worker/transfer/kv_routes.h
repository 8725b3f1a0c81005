#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/model/shard_layout.h"

namespace weft {

// The layouts of all ranks of a group, by rank.
absl::StatusOr<std::vector<ShardLayout>> LayoutsOfGroup(const LayoutOptions& options,
                                                        const HeadCounts& heads);

// `from_rank` sends to `to_rank` the KV of `heads` (of the model) of all positions that both own.
struct KvRoute {
  std::int32_t from_rank = 0;
  std::int32_t to_rank = 0;
  IndexRange heads;
  friend bool operator==(const KvRoute&, const KvRoute&) = default;
};

// What to send from one group to another: a pure function of their layouts, both by rank. Every
// (position, head) that a rank of `to` holds comes from exactly one rank of `from`. Where `from`
// holds a head several times, each copy gives about as much as the others.
std::vector<KvRoute> PlanKvRoutes(absl::Span<const ShardLayout> from,
                                  absl::Span<const ShardLayout> to);

// Calls unit(position, count) for all positions in [first, end) that both own, in order: count is
// 16 where 16 of them are a whole tile of K (kernels/attention.h) on both sides, else 1. Stops when
// it returns false.
template <typename Unit>
void ForEachSharedUnit(const ShardLayout& a, const ShardLayout& b, std::int64_t first,
                       std::int64_t end, Unit&& unit);

inline constexpr std::int32_t kKvTile = 16;  // tokens

namespace internal {

inline std::int64_t NextOwned(const ShardLayout& layout, std::int64_t position) {
  return layout.Owns(position) ? position : layout.PositionOf(layout.LocalLength(position));
}
// Where the run of owned positions around `position` ends.
inline std::int64_t RunEnd(const ShardLayout& layout, std::int64_t position, std::int64_t end) {
  if (layout.decode_context_parallel_size() == 1) return end;
  return (position / layout.interleave() + 1) * layout.interleave();
}
inline bool HasWholeTiles(const ShardLayout& layout) {
  return layout.block_tokens_per_rank() % kKvTile == 0 &&
         (layout.decode_context_parallel_size() == 1 || layout.interleave() % kKvTile == 0);
}

}  // namespace internal

template <typename Unit>
void ForEachSharedUnit(const ShardLayout& a, const ShardLayout& b, std::int64_t first,
                       std::int64_t end, Unit&& unit) {
  const bool tiles = internal::HasWholeTiles(a) && internal::HasWholeTiles(b);
  std::int64_t position = first;
  while (position < end) {
    const std::int64_t owned = internal::NextOwned(b, internal::NextOwned(a, position));
    if (owned >= end) return;
    if (!a.Owns(owned)) {
      position = owned;
      continue;
    }
    position = owned;
    const std::int64_t run_end =
        std::min({internal::RunEnd(a, position, end), internal::RunEnd(b, position, end), end});
    while (position < run_end) {
      const bool whole = tiles && position % kKvTile == 0 && run_end - position >= kKvTile;
      const std::int32_t count = whole ? kKvTile : 1;
      if (!unit(position, count)) return;
      position += count;
    }
  }
}

}  // namespace weft
