#pragma once

#include <climits>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/attention_heads.h"
#include "kernels/cuda/values.h"

// How attention on tensor cores spreads over blocks. An item is the rows of one sequence among
// rows_of_item consecutive ones: they share what they load. When there are fewer rows than blocks
// that run at once, the keys of an item are split into chunks, longer items into more, so that all
// chunks of a launch take about as long; lengths are read on the device alone, so that a recorded
// launch serves any. Chunks of an item then merge in order.

namespace weft::kernels::cuda {

inline constexpr float kLog2E = 1.44269504F;
inline constexpr float kLn2 = 0.693147181F;

// Sums over some keys, relative to the largest score, both of exp2(): what merges.
struct ChunkSoftmax {
  float max;
  float sum;
};

struct ItemChunks {
  std::int32_t first;
  std::int32_t count;
};

struct TensorCoreArgs {
  kernels::GqaAttentionParams g;  // q and out are these:
  const void* q;
  void* out;
  bool fp32;  // q and out are fp32, or else of kv_dtype
  std::int32_t heads_of_tile;
  std::int32_t head_tiles;  // of a KV head
  std::int32_t rows_of_item;
  std::int32_t slots;       // (row, head) pairs that a block has room for
  std::int32_t max_chunks;  // 0: items are not split, and what follows is not there
  std::int32_t min_chunk_tiles;
  ItemChunks* item_chunks;  // [num_rows], where items begin
  ChunkSoftmax* softmax;    // [max_chunks, KV heads * head_tiles, slots]
  float* values;            // the same of [value_dim], not normalized
};

// Keys [begin, end) are seen by some row, [full_begin, full_end) by all; tiles cover the first.
struct Item {
  std::int32_t row;
  std::int32_t num_rows;
  std::int32_t begin = INT_MAX;
  std::int32_t end = 0;
  std::int32_t full_begin = 0;
  std::int32_t full_end = INT_MAX;
};

// What a block computes.
struct Chunk {
  Item item;
  std::int32_t first_tile;
  std::int32_t end_tile;
  std::int32_t index;  // among all
  std::int32_t count;  // of the item's; 0: there is nothing for this block
};

__device__ __forceinline__ bool ItemBegins(const TensorCoreArgs& a, std::int32_t row) {
  return row % a.rows_of_item == 0 || a.g.row_slot[row] != a.g.row_slot[row - 1];
}

__device__ __forceinline__ Item ItemAt(const TensorCoreArgs& a, std::int32_t row) {
  Item item = {.row = row, .num_rows = 0};
  const std::int32_t room = a.rows_of_item - row % a.rows_of_item;
  const std::int32_t rest = a.g.num_rows - row;
  const std::int32_t most = room < rest ? room : rest;
  do {
    const std::int32_t first = a.g.first_visible[row + item.num_rows];
    const std::int32_t len = a.g.visible_len[row + item.num_rows];
    if (len > first) {
      item.begin = first < item.begin ? first : item.begin;
      item.end = len > item.end ? len : item.end;
    }
    item.full_begin = first > item.full_begin ? first : item.full_begin;
    item.full_end = len < item.full_end ? len : item.full_end;
    ++item.num_rows;
  } while (item.num_rows < most && a.g.row_slot[row + item.num_rows] == a.g.row_slot[row]);
  if (item.end == 0) item.begin = 0;
  return item;
}

template <int kTileKeys>
__device__ __forceinline__ std::int32_t TilesOf(const Item& item) {
  return (item.end + kTileKeys - 1) / kTileKeys - item.begin / kTileKeys;
}

// Puts chunk number `wanted` of all into *found, which all threads may read after it.
template <int kThreads, int kTileKeys>
__device__ __forceinline__ void FindChunk(const TensorCoreArgs& a, std::int32_t wanted,
                                          std::int32_t* scratch, Chunk* found) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t tiles = 0;
  std::int32_t items = 0;
  for (std::int32_t row = thread; row < a.g.num_rows; row += kThreads) {
    if (!ItemBegins(a, row)) continue;
    const std::int32_t of_item = TilesOf<kTileKeys>(ItemAt(a, row));
    tiles += of_item;
    items += of_item > 0;
  }
  std::int32_t all_tiles = 0;
  std::int32_t all_items = 0;
  BlockPrefix<kThreads>(tiles, scratch, all_tiles);
  BlockPrefix<kThreads>(items, scratch, all_items);
  // An item has at most one chunk that is not full, so that this many never are too many.
  const std::int32_t full = a.max_chunks - all_items;
  const std::int32_t of_chunk = full > 0 && all_tiles > 0 ? (all_tiles + full - 1) / full : INT_MAX;

  if (thread == 0) found->count = 0;
  std::int32_t begun = 0;
  for (std::int32_t first = 0; first < a.g.num_rows && begun <= wanted; first += kThreads) {
    const std::int32_t row = first + thread;
    Item item = {};
    std::int32_t count = 0;
    if (row < a.g.num_rows && ItemBegins(a, row)) {
      item = ItemAt(a, row);
      tiles = TilesOf<kTileKeys>(item);
      const std::int32_t most = tiles / a.min_chunk_tiles;
      count = tiles / of_chunk + (tiles % of_chunk != 0);
      count = count <= most ? count : most > 0 ? most : tiles > 0;
    }
    std::int32_t total = 0;
    const std::int32_t before = begun + BlockPrefix<kThreads>(count, scratch, total);
    if (wanted >= before && wanted < before + count) {
      const std::int32_t tile = item.begin / kTileKeys;
      const std::int32_t i = wanted - before;
      *found = {.item = item,
                .first_tile = tile + static_cast<std::int32_t>(std::int64_t{tiles} * i / count),
                .end_tile = tile + static_cast<std::int32_t>(std::int64_t{tiles} * (i + 1) / count),
                .index = wanted,
                .count = count};
      if (i == 0 && blockIdx.y == 0) a.item_chunks[row] = {before, count};
    }
    begun += total;
  }
  __syncthreads();
}

template <typename T>
__device__ __forceinline__ void StoreAs(void* out, std::int64_t at, float first, float second) {
  StorePack<2>(static_cast<T*>(out) + at, Pack<T, 2>{{Narrow<T>(first), Narrow<T>(second)}});
}

// The chunks of a row and head, in order; a block a row and head. What has one chunk is done.
inline constexpr int kMergeThreads = 64;
template <typename Kv>
__global__ void __launch_bounds__(kMergeThreads) MergeChunksKernel(TensorCoreArgs a) {
  const kernels::GqaAttentionParams& g = a.g;
  const auto row = static_cast<std::int32_t>(blockIdx.x);
  const auto head = static_cast<std::int32_t>(blockIdx.y);
  const std::int64_t at = std::int64_t{row} * g.num_q_heads + head;
  const bool empty = g.visible_len[row] <= g.first_visible[row];
  std::int32_t first_row = row;
  while (!ItemBegins(a, first_row)) --first_row;
  const ItemChunks chunks = empty ? ItemChunks{0, 0} : a.item_chunks[first_row];
  if (chunks.count == 1) return;

  const std::int32_t kv_head = (g.first_q_head + head) / g.q_per_kv - g.first_kv_head;
  const HeadTile whole = HeadTileOf(g, g.q_per_kv, 1, kv_head);
  const std::int32_t in_tile = (head - whole.first) % a.heads_of_tile;
  const std::int32_t tile = kv_head * a.head_tiles + (head - whole.first) / a.heads_of_tile;
  const HeadTile own = HeadTileOf(g, a.heads_of_tile, a.head_tiles, tile);
  const std::int32_t slot = (row - first_row) * own.count + in_tile;
  const auto record = [&](std::int32_t i) {
    return (std::int64_t{chunks.first + i} * (g.num_kv_heads * a.head_tiles) + tile) * a.slots +
           slot;
  };
  float max = -INFINITY;
  for (std::int32_t i = 0; i < chunks.count; ++i) max = fmaxf(max, a.softmax[record(i)].max);
  const float shift = max == -INFINITY ? 0.0F : max;
  float sum = 0.0F;
  for (std::int32_t i = 0; i < chunks.count; ++i) {
    const ChunkSoftmax softmax = a.softmax[record(i)];
    sum += softmax.sum * exp2f(softmax.max - shift);
  }
  const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
  if (threadIdx.x == 0) g.lse[at] = sum > 0.0F ? max * kLn2 + logf(sum) : -INFINITY;
  for (std::int32_t dim = 2 * static_cast<std::int32_t>(threadIdx.x); dim < g.value_dim;
       dim += 2 * kMergeThreads) {
    float first = 0.0F;
    float second = 0.0F;
    for (std::int32_t i = 0; i < chunks.count; ++i) {
      const float factor = exp2f(a.softmax[record(i)].max - shift);
      const Pack<float, 2> values = LoadPack<2>(a.values + record(i) * g.value_dim + dim);
      first += values.v[0] * factor;
      second += values.v[1] * factor;
    }
    if (a.fp32) {
      StoreAs<float>(a.out, at * g.value_dim + dim, first * inverse, second * inverse);
    } else {
      StoreAs<Kv>(a.out, at * g.value_dim + dim, first * inverse, second * inverse);
    }
  }
}

}  // namespace weft::kernels::cuda
