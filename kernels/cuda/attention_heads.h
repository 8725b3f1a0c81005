#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/platform.h"

namespace weft::kernels::cuda {

// The query heads of a block: [first, first + count) of the rank's.
struct HeadTile {
  std::int32_t kv_head;
  std::int32_t first;
  std::int32_t count;
};

// Number `index` of the tiles of up to `heads` heads, `head_tiles` to a KV head.
__device__ __forceinline__ HeadTile HeadTileOf(const kernels::GqaAttentionParams& g,
                                               std::int32_t heads, std::int32_t head_tiles,
                                               std::int32_t index) {
  HeadTile tile;
  tile.kv_head = index / head_tiles;
  const std::int32_t kv = g.first_kv_head + tile.kv_head;  // global
  std::int32_t begin = kv * g.q_per_kv - g.first_q_head;
  std::int32_t end = begin + g.q_per_kv;
  begin = begin > 0 ? begin : 0;
  end = end < g.num_q_heads ? end : g.num_q_heads;
  tile.first = begin + index % head_tiles * heads;
  const std::int32_t rest = end - tile.first;
  tile.count = rest < 0 ? 0 : rest < heads ? rest : heads;
  return tile;
}

}  // namespace weft::kernels::cuda
