#include "worker/transfer/kv_routes.h"

#include <algorithm>

#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<std::vector<ShardLayout>> LayoutsOfGroup(const LayoutOptions& options,
                                                        const HeadCounts& heads) {
  std::vector<ShardLayout> layouts;
  for (std::int32_t rank = 0; rank < options.tensor_parallel_size; ++rank) {
    ASSIGN_OR_RETURN(const ShardLayout layout, ShardLayout::Create(options, heads, rank));
    layouts.push_back(layout);
  }
  return layouts;
}

std::vector<KvRoute> PlanKvRoutes(absl::Span<const ShardLayout> from,
                                  absl::Span<const ShardLayout> to) {
  const std::int32_t dcp = from[0].decode_context_parallel_size();
  const std::int32_t num_copies = from[0].tensor_parallel_size() / dcp;  // DCP groups
  std::vector<std::int64_t> load(num_copies);                            // heads given
  std::vector<KvRoute> routes;
  for (const ShardLayout& receiver : to) {
    const IndexRange wanted = receiver.GroupKvHeads();
    std::int32_t run_group = -1;
    for (std::int32_t head = wanted.begin; head < wanted.end; ++head) {
      std::int32_t chosen = -1;
      for (std::int32_t group = 0; group < num_copies; ++group) {
        const IndexRange held = from[group * dcp].GroupKvHeads();
        if (head < held.begin || head >= held.end) continue;
        if (chosen < 0 || load[group] < load[chosen]) chosen = group;
      }
      CHECK_MSG(chosen >= 0, "a group holds all heads of its model");
      ++load[chosen];
      for (std::int32_t rank = 0; rank < dcp; ++rank) {
        if (chosen == run_group) {
          ++routes[routes.size() - dcp + rank].heads.end;
        } else {
          routes.push_back({.from_rank = chosen * dcp + rank,
                            .to_rank = receiver.rank(),
                            .heads = {head, head + 1}});
        }
      }
      run_group = chosen;
    }
  }
  return routes;
}

}  // namespace weft
