#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attention_mma_shape.h"
#include "kernels/cuda/attention_split.h"
#include "kernels/cuda/attention_tensor_core.h"
#include "kernels/cuda/kv_append.h"
#include "kernels/cuda/tensor_core.h"

// Attention on tensor cores: the kernel of attention_gqa.cu and attention_mla.cu. A block has up to
// kSlots (row, head) pairs of one item and KV head as the rows of its products, and goes through
// the keys in tiles of kTileKeys, the next of which is on its way meanwhile. Scores are split over
// the warps by slots and keys; weights meet in shared memory; values are split by dims.

namespace weft::kernels::cuda {

// Of the calling thread's key of `tile`.
template <typename S>
__device__ __forceinline__ std::int64_t KeyOffset(const TensorCoreArgs& a, const MmaBlock& block,
                                                  std::int32_t tile) {
  const std::int32_t key = tile * S::kTileKeys + static_cast<std::int32_t>(threadIdx.x);
  if (key < block.chunk.item.begin || key >= block.chunk.item.end) return 0;
  const std::int32_t size = a.g.block_tokens_per_rank;
  return KvIndex(block.blocks[key / size], block.heads.kv_head, key % size, a.g.num_kv_heads, size,
                 S::kHeadDim);
}

// Starts the copies of a tile, zeros for keys that no row sees.
template <typename S>
__device__ __forceinline__ void FetchTile(const TensorCoreArgs& a, const MmaBlock& block,
                                          const MmaShared<S>& shared, std::int32_t tile) {
  using Kv = typename S::Kv;
  constexpr int kChunks = S::kHeadDim / 8;
  const auto* k = static_cast<const Kv*>(a.g.k_blocks);
  const auto* v = static_cast<const Kv*>(a.g.v_blocks);
  Kv* to = shared.stage(tile);
  for (int i = static_cast<int>(threadIdx.x); i < S::kTileKeys * kChunks; i += S::kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const std::int32_t key = tile * S::kTileKeys + row;
    const bool valid = key >= block.chunk.item.begin && key < block.chunk.item.end;
    const std::int64_t from = shared.offsets[tile % 2 * S::kTileKeys + row] + chunk * 8;
    const int at = SwizzledChunk<S::kRowBytes>(row, chunk) * 8;
    CpAsync16(to + at, k + from, valid);
    if constexpr (!S::kLatent) CpAsync16(to + S::kTileValues + at, v + from, valid);
  }
  CpAsyncCommit();
}

// Queries in Kv and what their rows see, by slot; zeros and nothing past the last.
template <typename S>
__device__ __forceinline__ void LoadQueries(const TensorCoreArgs& a, const MmaBlock& block,
                                            const MmaShared<S>& shared) {
  using Kv = typename S::Kv;
  constexpr int kChunks = S::kHeadDim / 8;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t i = thread; i < block.slot_tiles * 16 * kChunks; i += S::kThreads) {
    const std::int32_t slot = i / kChunks;
    const std::int32_t chunk = i % kChunks;
    Pack<Kv, 8> q = {};
    if (slot < block.num_slots) {
      const std::int64_t row = block.chunk.item.row + slot / block.heads.count;
      const std::int32_t head = block.heads.first + slot % block.heads.count;
      const std::int64_t from = (row * a.g.num_q_heads + head) * S::kHeadDim + chunk * 8;
      if (a.fp32) {
        const auto* wide = static_cast<const float*>(a.q) + from;
        const Pack<float, 4> low = LoadPack<4>(wide);
        const Pack<float, 4> high = LoadPack<4>(wide + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          q.v[j] = Narrow<Kv>(low.v[j]);
          q.v[j + 4] = Narrow<Kv>(high.v[j]);
        }
      } else {
        q = LoadPack<8>(static_cast<const Kv*>(a.q) + from);
      }
    }
    const int at = SwizzledChunk<S::kRowBytes>(slot, chunk) * 8;
    *reinterpret_cast<Pack<Kv, 8>*>(shared.q + at) = q;
  }
  if (thread < S::kSlots) {
    const bool used = thread < block.num_slots;
    const std::int32_t row = block.chunk.item.row + (used ? thread / block.heads.count : 0);
    shared.first[thread] = used ? a.g.first_visible[row] : 0;
    shared.end[thread] = used ? a.g.visible_len[row] : 0;
  }
}

template <typename S>
struct Scores {
  Accumulator4 s[S::kWarpSlotTiles][S::kWarpKeys / 8];
};

// A warp's slot tile `m` is number warp_m * kWarpSlotTiles + m of the block's.
template <typename S>
__device__ __forceinline__ void Multiply(const MmaBlock& block, const MmaShared<S>& shared,
                                         std::int32_t tile, int first_slot_tile, int first_key,
                                         Scores<S>& scores) {
  using Kv = typename S::Kv;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Kv* k = shared.stage(tile);
#pragma unroll
  for (int m = 0; m < S::kWarpSlotTiles; ++m) {
#pragma unroll
    for (int n = 0; n < S::kWarpKeys / 8; ++n) scores.s[m][n] = {};
  }
  const auto queries = [&](int m, int chunk) {
    const int slot = (first_slot_tile + m) * 16 + lane % 16;
    return LdMatrixX4<false>(shared.q + SwizzledChunk<S::kRowBytes>(slot, chunk + lane / 16) * 8);
  };
  if constexpr (S::kWarpKeys == 8) {
#pragma unroll 2
    for (int chunk = 0; chunk < S::kHeadDim / 8; chunk += 4) {  // two steps of 16 dims
      const Fragment4 keys = LdMatrixX4<false>(
          k + SwizzledChunk<S::kRowBytes>(first_key + lane % 8, chunk + lane / 8) * 8);
#pragma unroll
      for (int m = 0; m < S::kWarpSlotTiles; ++m) {
        if (first_slot_tile + m >= block.slot_tiles) continue;
        MmaM16N8K16<Kv>(queries(m, chunk), {{keys.r[0], keys.r[1]}}, scores.s[m][0]);
        MmaM16N8K16<Kv>(queries(m, chunk + 2), {{keys.r[2], keys.r[3]}}, scores.s[m][0]);
      }
    }
  } else {
#pragma unroll 4
    for (int chunk = 0; chunk < S::kHeadDim / 8; chunk += 2) {
      Fragment4 keys[S::kWarpKeys / 16];
#pragma unroll
      for (int j = 0; j < S::kWarpKeys / 16; ++j) {
        const int key = first_key + j * 16 + lane / 16 * 8 + lane % 8;
        keys[j] = LdMatrixX4<false>(k + SwizzledChunk<S::kRowBytes>(key, chunk + lane / 8 % 2) * 8);
      }
#pragma unroll
      for (int m = 0; m < S::kWarpSlotTiles; ++m) {
        if (first_slot_tile + m >= block.slot_tiles) continue;
        const Fragment4 q = queries(m, chunk);
#pragma unroll
        for (int j = 0; j < S::kWarpKeys / 16; ++j) {
          MmaM16N8K16<Kv>(q, {{keys[j].r[0], keys[j].r[1]}}, scores.s[m][2 * j]);
          MmaM16N8K16<Kv>(q, {{keys[j].r[2], keys[j].r[3]}}, scores.s[m][2 * j + 1]);
        }
      }
    }
  }
}

// A thread has columns 2t and 2t + 1 of eight, of slots g and g + 8 of sixteen (tensor_core.h);
// values c[2 * half] and c[2 * half + 1] are of slot g + 8 * half.
__device__ __forceinline__ float QuadMax(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}
__device__ __forceinline__ float QuadSum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// Scales the scores, takes out what a row does not see, and tells the other warps the largest.
template <typename S>
__device__ __forceinline__ void MaskAndMax(const TensorCoreArgs& a, const MmaBlock& block,
                                           const MmaShared<S>& shared, std::int32_t tile,
                                           int first_slot_tile, int first_key, int warp_n,
                                           Scores<S>& scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float scale = a.g.scale * kLog2E;
  const std::int32_t tile_begin = tile * S::kTileKeys;
  const bool all_seen = tile_begin >= block.chunk.item.full_begin &&
                        tile_begin + S::kTileKeys <= block.chunk.item.full_end;
#pragma unroll
  for (int m = 0; m < S::kWarpSlotTiles; ++m) {
    if (first_slot_tile + m >= block.slot_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = (first_slot_tile + m) * 16 + half * 8 + lane / 4;
      const std::int32_t first = all_seen ? 0 : shared.first[slot];
      const std::int32_t end = all_seen ? INT_MAX : shared.end[slot];
      float max = -INFINITY;
#pragma unroll
      for (int n = 0; n < S::kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::int32_t key = tile_begin + first_key + n * 8 + lane % 4 * 2 + i;
          float& score = scores.s[m][n].c[half * 2 + i];
          score = key >= first && key < end ? score * scale : -INFINITY;
          max = fmaxf(max, score);
        }
      }
      max = QuadMax(max);
      if (lane % 4 == 0) shared.warp_max[warp_n * S::kSlots + slot] = max;
    }
  }
}

// Weights of the tile into shared memory, relative to the largest score so far.
template <typename S>
__device__ __forceinline__ void Weigh(const MmaBlock& block, const MmaShared<S>& shared,
                                      int first_slot_tile, int first_key, int warp_n,
                                      Scores<S>& scores,
                                      float (&running_max)[S::kWarpSlotTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < S::kWarpSlotTiles; ++m) {
    if (first_slot_tile + m >= block.slot_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = (first_slot_tile + m) * 16 + half * 8 + lane / 4;
      const float old = running_max[m][half];
      float max = old;
#pragma unroll
      for (int w = 0; w < S::kWarpsN; ++w) max = fmaxf(max, shared.warp_max[w * S::kSlots + slot]);
      running_max[m][half] = max;
      const float shift = max == -INFINITY ? 0.0F : max;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < S::kWarpKeys / 8; ++n) {
        const Accumulator4& s = scores.s[m][n];
        const float p0 = exp2f(s.c[half * 2] - shift);
        const float p1 = exp2f(s.c[half * 2 + 1] - shift);
        sum += p0 + p1;
        const int key = first_key + n * 8 + lane % 4 * 2;
        *reinterpret_cast<std::uint32_t*>(shared.weights + slot * S::kWeightsStride + key) =
            PairOf<typename S::Kv>(p0, p1);
      }
      sum = QuadSum(sum);
      if (lane % 4 == 0) {
        shared.warp_sum[warp_n * S::kSlots + slot] = sum;
        if (warp_n == 0) {
          shared.rescale[slot] = exp2f(old - shift);
          shared.max[slot] = max;
        }
      }
    }
  }
}

template <typename S>
struct Values {
  Accumulator4 o[S::kSlotTiles][S::kWarpDims / 8];
};

template <typename S>
__device__ __forceinline__ void AddValues(const MmaBlock& block, const MmaShared<S>& shared,
                                          std::int32_t tile, Values<S>& values) {
  using Kv = typename S::Kv;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_chunk = static_cast<int>(threadIdx.x) / 32 * (S::kWarpDims / 8);
  const Kv* v = shared.stage(tile) + (S::kLatent ? 0 : S::kTileValues);
#pragma unroll
  for (int m = 0; m < S::kSlotTiles; ++m) {
    if (m >= block.slot_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = shared.rescale[m * 16 + half * 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < S::kWarpDims / 8; ++n) {
        values.o[m][n].c[half * 2] *= factor;
        values.o[m][n].c[half * 2 + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int key = 0; key < S::kTileKeys; key += 16) {
    Fragment4 weights[S::kSlotTiles] = {};
#pragma unroll
    for (int m = 0; m < S::kSlotTiles; ++m) {
      if (m >= block.slot_tiles) continue;
      weights[m] = LdMatrixX4<false>(shared.weights + (m * 16 + lane % 16) * S::kWeightsStride +
                                     key + lane / 16 * 8);
    }
#pragma unroll
    for (int d = 0; d < S::kWarpDims / 16; ++d) {
      const Fragment4 f = LdMatrixX4<true>(
          v + SwizzledChunk<S::kRowBytes>(key + lane % 16, first_chunk + 2 * d + lane / 16) * 8);
#pragma unroll
      for (int m = 0; m < S::kSlotTiles; ++m) {
        if (m >= block.slot_tiles) continue;
        MmaM16N8K16<Kv>(weights[m], {{f.r[0], f.r[1]}}, values.o[m][2 * d]);
        MmaM16N8K16<Kv>(weights[m], {{f.r[2], f.r[3]}}, values.o[m][2 * d + 1]);
      }
    }
  }
}

// Outputs and LSE of a whole item; sums and weights of one that is split. `sum` is of slot
// threadIdx.x.
template <typename S>
__device__ __forceinline__ void StoreChunk(const TensorCoreArgs& a, const MmaBlock& block,
                                           const MmaShared<S>& shared, float sum,
                                           const Values<S>& values) {
  using Kv = typename S::Kv;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto lane = thread % 32;
  const bool whole = block.chunk.count == 1;
  const std::int64_t first_record =
      (std::int64_t{block.chunk.index} * gridDim.y + blockIdx.y) * S::kSlots;
  const auto index_of = [&](std::int32_t slot) {
    const std::int64_t row = block.chunk.item.row + slot / block.heads.count;
    return row * a.g.num_q_heads + block.heads.first + slot % block.heads.count;
  };
  __syncthreads();  // rescale has been used
  if (thread < block.num_slots) {
    shared.rescale[thread] = !whole ? 1.0F : sum > 0.0F ? 1.0F / sum : 0.0F;
    if (whole) {
      a.g.lse[index_of(thread)] = sum > 0.0F ? shared.max[thread] * kLn2 + logf(sum) : -INFINITY;
    } else {
      a.softmax[first_record + thread] = {shared.max[thread], sum};
    }
  }
  __syncthreads();
  const std::int32_t first_dim = thread / 32 * S::kWarpDims + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < S::kSlotTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t slot = m * 16 + half * 8 + lane / 4;
      if (slot >= block.num_slots) continue;
      const float factor = shared.rescale[slot];
      const std::int64_t at = whole ? index_of(slot) : first_record + slot;
#pragma unroll
      for (int n = 0; n < S::kWarpDims / 8; ++n) {
        const float first = values.o[m][n].c[half * 2] * factor;
        const float second = values.o[m][n].c[half * 2 + 1] * factor;
        const std::int64_t to = at * S::kValueDim + first_dim + n * 8;
        if (!whole) {
          StoreAs<float>(a.values, to, first, second);
        } else if (a.fp32) {
          StoreAs<float>(a.out, to, first, second);
        } else {
          StoreAs<Kv>(a.out, to, first, second);
        }
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void Attend(const TensorCoreArgs& a, const MmaBlock& block,
                                       const MmaShared<S>& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const int warp = thread / 32;
  const int first_slot_tile = warp / S::kWarpsN * S::kWarpSlotTiles;
  const int warp_n = warp % S::kWarpsN;
  const int first_key = warp_n * S::kWarpKeys;
  Values<S> values = {};
  float running_max[S::kWarpSlotTiles][2];
#pragma unroll
  for (int m = 0; m < S::kWarpSlotTiles; ++m) running_max[m][0] = running_max[m][1] = -INFINITY;
  float sum = 0.0F;
  if (thread < S::kSlots) shared.max[thread] = -INFINITY;
  for (int i = 0; i < 2 && thread < S::kTileKeys; ++i) {
    const std::int32_t tile = block.chunk.first_tile + i;
    shared.offsets[tile % 2 * S::kTileKeys + thread] = KeyOffset<S>(a, block, tile);
  }
  __syncthreads();
  if (block.chunk.first_tile < block.chunk.end_tile)
    FetchTile<S>(a, block, shared, block.chunk.first_tile);
  LoadQueries<S>(a, block, shared);
  for (std::int32_t tile = block.chunk.first_tile; tile < block.chunk.end_tile; ++tile) {
    CpAsyncWait<0>();
    __syncthreads();  // the tile is there, and the one before it has been used
    if (tile + 1 < block.chunk.end_tile) FetchTile<S>(a, block, shared, tile + 1);
    std::int64_t offset = 0;
    if (thread < S::kTileKeys) offset = KeyOffset<S>(a, block, tile + 2);
    Scores<S> scores;
    Multiply<S>(block, shared, tile, first_slot_tile, first_key, scores);
    MaskAndMax<S>(a, block, shared, tile, first_slot_tile, first_key, warp_n, scores);
    if (thread < S::kTileKeys) shared.offsets[tile % 2 * S::kTileKeys + thread] = offset;
    __syncthreads();
    Weigh<S>(block, shared, first_slot_tile, first_key, warp_n, scores, running_max);
    __syncthreads();
    if (thread < block.num_slots) {
      sum *= shared.rescale[thread];
      for (int w = 0; w < S::kWarpsN; ++w) sum += shared.warp_sum[w * S::kSlots + thread];
    }
    AddValues<S>(block, shared, tile, values);
  }
  StoreChunk<S>(a, block, shared, sum, values);
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksOfSm)
    TensorCoreAttentionKernel(TensorCoreArgs a) {
  WEFT_DYNAMIC_SHARED(unsigned char, memory);
  WEFT_SHARED(Chunk, found, 1);
  WEFT_SHARED(std::int32_t, scratch, S::kWarps);
  const auto index = static_cast<std::int32_t>(blockIdx.x);
  if (a.max_chunks > 0) {
    FindChunk<S::kThreads, S::kTileKeys>(a, index, scratch, found);
  } else {
    if (threadIdx.x == 0) {
      found->count = ItemBegins(a, index) ? 1 : 0;
      if (found->count > 0) {
        found->item = ItemAt(a, index);
        found->first_tile = found->item.begin / S::kTileKeys;
        found->end_tile = found->first_tile + TilesOf<S::kTileKeys>(found->item);
      }
      found->index = 0;
    }
    __syncthreads();
  }
  MmaBlock block;
  block.chunk = *found;
  if (block.chunk.count == 0) return;  // the whole block, as below
  block.heads =
      HeadTileOf(a.g, a.heads_of_tile, a.head_tiles, static_cast<std::int32_t>(blockIdx.y));
  if (block.heads.count == 0) return;
  block.num_slots = block.chunk.item.num_rows * block.heads.count;
  block.slot_tiles = (block.num_slots + 15) / 16;
  block.blocks =
      a.g.block_table + std::int64_t{a.g.row_slot[block.chunk.item.row]} * a.g.max_blocks_per_seq;
  Attend<S>(a, block, MmaShared<S>(memory));
}

// Chunks of a launch over `tiles` KV heads and their tiles of heads: two for each block that runs
// at once, so that what is uneven evens out.
template <typename S>
std::int32_t MaxChunks(std::int32_t tiles) {
  return 2 * NumSms() * S::kBlocksOfSm / tiles;
}

template <typename S>
std::int64_t SplitWorkspaceBytes() {
  const std::int64_t chunks = MaxChunks<S>(1);
  const std::int64_t record = sizeof(ChunkSoftmax) + sizeof(float) * S::kValueDim;
  return chunks * (static_cast<std::int64_t>(sizeof(ItemChunks)) + S::kSlots * record);
}

// Of so many keys that what a chunk leaves to be merged is little beside them; where there are many
// heads to a latent, time goes to products instead.
template <typename S>
std::int32_t MinChunkKeys(std::int32_t heads_of_tile) {
  if (S::kLatent && S::kSlots > 16) return 512;
  return std::clamp(heads_of_tile * (S::kLatent ? 64 : 32), 256, 1024);
}

// Sixteen slots leave room for more blocks where one row of a sequence is the rule; chunks of
// prompts share their keys in more.
inline bool PrefersManySlots(const kernels::GqaAttentionParams& g) {
  constexpr std::int32_t kMaxDecodeRows = 256;
  return std::min(g.q_per_kv, g.num_q_heads) > 16 || g.num_rows > kMaxDecodeRows;
}

template <typename S>
absl::Status LaunchTensorCore(const TensorCoreAttention& p, void* workspace, CudaStream& stream) {
  const kernels::GqaAttentionParams& g = p.geometry;
  const std::int32_t heads = std::min(g.q_per_kv, g.num_q_heads);
  const std::int32_t heads_of_tile = std::min(heads, S::kSlots);
  const std::int32_t head_tiles = (heads + S::kSlots - 1) / S::kSlots;
  const std::int32_t tiles = g.num_kv_heads * head_tiles;
  const std::int32_t chunks = MaxChunks<S>(tiles);
  const std::int32_t min_chunk = MinChunkKeys<S>(heads_of_tile);
  const bool split = g.num_rows < chunks && p.max_visible_len >= 2 * min_chunk;
  auto* item_chunks = static_cast<ItemChunks*>(workspace);
  auto* softmax = reinterpret_cast<ChunkSoftmax*>(item_chunks + chunks);
  auto* values = reinterpret_cast<float*>(softmax + std::int64_t{chunks} * tiles * S::kSlots);
  const TensorCoreArgs args = {.g = g,
                               .q = p.q,
                               .out = p.out,
                               .fp32 = p.fp32,
                               .heads_of_tile = heads_of_tile,
                               .head_tiles = head_tiles,
                               .rows_of_item = S::kSlots / heads_of_tile,
                               .slots = S::kSlots,
                               .max_chunks = split ? chunks : 0,
                               .min_chunk_tiles = min_chunk / S::kTileKeys,
                               .item_chunks = item_chunks,
                               .softmax = softmax,
                               .values = values};
  const dim3 grid(static_cast<unsigned>(split ? chunks : g.num_rows), static_cast<unsigned>(tiles));
  absl::Status status = Launch<TensorCoreAttentionKernel<S>>(
      "GqaAttention", grid, S::kThreads, S::kSharedBytes, stream.handle(), args);
  if (!status.ok() || !split) return status;
  const dim3 merge_grid(static_cast<unsigned>(g.num_rows), static_cast<unsigned>(g.num_q_heads));
  return Launch<MergeChunksKernel<typename S::Kv>>("GqaAttention merge", merge_grid, kMergeThreads,
                                                   0, stream.handle(), args);
}

}  // namespace weft::kernels::cuda
