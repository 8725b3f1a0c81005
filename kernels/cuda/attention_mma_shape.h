#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention_split.h"

// What the blocks of attention_mma.h are made of.

namespace weft::kernels::cuda {

template <typename KvType, int kHeadDimOf, int kValueDimOf, int kSlotsOf>
struct MmaShape {
  using Kv = KvType;
  static constexpr int kHeadDim = kHeadDimOf;
  static constexpr int kValueDim = kValueDimOf;
  static constexpr int kSlots = kSlotsOf;
  static constexpr bool kLatent = kHeadDim != kValueDim;
  static constexpr int kTileKeys = kLatent ? 32 : 64;
  static constexpr int kWarpsM = kSlots == 16 ? 1 : kLatent ? 4 : 2;
  static constexpr int kWarpsN = kSlots == 16 ? 4 : 2;
  static constexpr int kWarps = kWarpsM * kWarpsN;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSlotTiles = kSlots / 16;
  static constexpr int kWarpSlotTiles = kSlotTiles / kWarpsM;  // of the scores
  static constexpr int kWarpKeys = kTileKeys / kWarpsN;        // likewise
  static constexpr int kWarpDims = kValueDim / kWarps;         // of the values
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kTileValues = kTileKeys * kHeadDim;
  static constexpr int kStageValues = kLatent ? kTileValues : 2 * kTileValues;
  // Of the weights; an odd number of 16 bytes, for ldmatrix without conflicts.
  static constexpr int kWeightsStride = kTileKeys + 8;
  static constexpr std::size_t kSharedBytes =
      sizeof(Kv) * (kSlots * kHeadDim + 2 * kStageValues + kSlots * kWeightsStride) +
      sizeof(std::int64_t) * 2 * kTileKeys + sizeof(float) * kSlots * (2 * kWarpsN + 4);
  // Of an SM with 227 KiB; registers allow as many.
  static constexpr int kBlocksOfSm =
      std::clamp(static_cast<int>((227 * 1024) / (kSharedBytes + 2048)), 1, 4);
  static_assert(kWarpKeys % 16 == 0 || kWarpKeys == 8);
  static_assert(kWarpDims % 16 == 0 && kHeadDim % 32 == 0 && kThreads >= kSlots);
};

template <typename S>
struct MmaShared {
  using Kv = typename S::Kv;
  Kv* q;                  // [kSlots] rows, swizzled
  Kv* stages;             // [2][kTileKeys] rows of K, swizzled; then of V, but for a latent
  Kv* weights;            // [kSlots][kWeightsStride]
  std::int64_t* offsets;  // [2][kTileKeys] where a key is in the pool, in values
  float* warp_max;        // [kWarpsN][kSlots] of a tile's scores
  float* warp_sum;        // [kWarpsN][kSlots] of its weights
  float* max;             // [kSlots] so far
  float* rescale;         // [kSlots] of what was summed before this tile; at the end 1 / sum
  std::int32_t* first;    // [kSlots] the keys a slot's row sees
  std::int32_t* end;      // [kSlots]

  __device__ explicit MmaShared(unsigned char* memory) {
    q = reinterpret_cast<Kv*>(memory);
    stages = q + S::kSlots * S::kHeadDim;
    weights = stages + 2 * S::kStageValues;
    offsets = reinterpret_cast<std::int64_t*>(weights + S::kSlots * S::kWeightsStride);
    warp_max = reinterpret_cast<float*>(offsets + 2 * S::kTileKeys);
    warp_sum = warp_max + S::kWarpsN * S::kSlots;
    max = warp_sum + S::kWarpsN * S::kSlots;
    rescale = max + S::kSlots;
    first = reinterpret_cast<std::int32_t*>(rescale + S::kSlots);
    end = first + S::kSlots;
  }
  __device__ __forceinline__ Kv* stage(std::int32_t tile) const {
    return stages + tile % 2 * S::kStageValues;
  }
};

// What all threads of a block know.
struct MmaBlock {
  Chunk chunk;
  HeadTile heads;
  std::int32_t num_slots;
  std::int32_t slot_tiles;  // of 16 that are used
  const std::int32_t* blocks;
};

}  // namespace weft::kernels::cuda
