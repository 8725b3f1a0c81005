#pragma once

#include <cstdint>

#include "kernels/moe.h"
#include "tests/kernels/kernel_test.h"

namespace weft::kernels {

// A router of any kind, without its arrays: every score, grouping and scale comes with some seed.
// `max_group`: experts of a group.
inline RouteRowsParams DrawRouting(Rng& rng, std::uint64_t seed, std::int32_t max_rows,
                                   std::int32_t max_group) {
  const std::int32_t num_groups = RandomInt(rng, 1, 6);
  const std::int32_t size = RandomInt(rng, 1, max_group);
  const std::int32_t top_groups = RandomInt(rng, 1, num_groups);
  return {.num_rows = RandomInt(rng, 0, max_rows),
          .num_experts = num_groups * size,
          .top_k = RandomInt(rng, 1, top_groups * size),
          .score = static_cast<ExpertScore>(seed % 2),
          .group_score = static_cast<GroupScore>(seed / 2 % 3),
          .num_groups = num_groups,
          .top_groups = top_groups,
          .normalize = seed / 6 % 2 == 0,
          .scale = seed % 5 == 0 ? 2.5F : 1.0F};
}

}  // namespace weft::kernels
