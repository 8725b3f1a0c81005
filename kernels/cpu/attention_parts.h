#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/attention.h"

// How attention is cut up, and where its keys are.

namespace weft::kernels {

inline constexpr std::int64_t kTileKeys = 64;     // keys of a step of the online softmax
inline constexpr std::int64_t kPartKeys = 512;    // keys of a part; a multiple of kTileKeys
inline constexpr std::int64_t kTileQueries = 48;  // queries (rows times heads) that share a tile

// Adjacent rows of one sequence and the query heads of one KV head.
struct AttentionItem {
  std::int64_t first_row;
  std::int64_t end_row;
  std::int64_t kv_head;
  std::int64_t first_head;  // query heads
  std::int64_t end_head;
};

constexpr std::int64_t NumQueries(const AttentionItem& item) {
  return (item.end_row - item.first_row) * (item.end_head - item.first_head);
}

// A query's running result: [PaddedDim(value_dim)] weighted sum of V, then the largest score, or
// what weights are relative to, and the sum of exp(score - largest); DotAttendKeys() has one more.
constexpr std::int64_t PaddedDim(std::int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr std::int64_t RecordFloats(std::int64_t value_dim) { return PaddedDim(value_dim) + 16; }

// A thread's scratch; each is a multiple of 64 bytes.
struct AttentionScratch {
  float* q;        // [queries, head_dim], scaled
  float* scores;   // [queries, kTileKeys]
  float* k;        // [kTileKeys / 16, head_dim, 16]
  float* v;        // [kTileKeys, PaddedDim(value_dim)]
  float* part;     // [queries, RecordFloats]
  float* running;  // [queries, RecordFloats]

  static constexpr std::int64_t Floats(std::int64_t queries, std::int64_t head_dim,
                                       std::int64_t value_dim) {
    return queries * (PaddedDim(head_dim) + kTileKeys + 2 * RecordFloats(value_dim)) +
           (PaddedDim(head_dim) + PaddedDim(value_dim)) * kTileKeys;
  }

  AttentionScratch(float* memory, std::int64_t queries, std::int64_t head_dim,
                   std::int64_t value_dim) {
    q = memory;
    scores = q + queries * PaddedDim(head_dim);
    k = scores + queries * kTileKeys;
    v = k + PaddedDim(head_dim) * kTileKeys;
    part = v + PaddedDim(value_dim) * kTileKeys;
    running = part + queries * RecordFloats(value_dim);
  }
};

// Calls body(std::integral_constant<DType, dtype>()).
template <typename Body>
void WithDType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(std::integral_constant<DType, DType::kFloat32>());
    case DType::kBFloat16:
      return body(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16:
      return body(std::integral_constant<DType, DType::kFloat16>());
  }
}

// A local token of a sequence and KV head: where its block's K or V is, and where in it.
struct KvPlace {
  const std::byte* block;
  std::int32_t token;
};

inline KvPlace PlaceOf(const GqaAttentionParams& p, const void* blocks, std::int64_t slot,
                       std::int64_t kv_head, std::int64_t token) {
  const std::int64_t block =
      p.block_table[slot * p.max_blocks_per_seq + token / p.block_tokens_per_rank];
  const std::int64_t head_elements = std::int64_t{p.block_tokens_per_rank} * p.head_dim;
  return {static_cast<const std::byte*>(blocks) +
              (block * p.num_kv_heads + kv_head) * head_elements * DTypeBytes(p.kv_dtype),
          static_cast<std::int32_t>(token % p.block_tokens_per_rank)};
}

// Calls body(key, end, place) for the stretches of [begin, end) that each lie in one block.
template <typename Body>
void ForBlocks(const GqaAttentionParams& p, const void* blocks, std::int64_t slot,
               std::int64_t kv_head, std::int64_t begin, std::int64_t end, const Body& body) {
  for (std::int64_t key = begin; key < end;) {
    const KvPlace place = PlaceOf(p, blocks, slot, kv_head, key);
    const std::int64_t stop = std::min(end, key + p.block_tokens_per_rank - place.token);
    body(key, stop, place);
    key = stop;
  }
}

// The keys of a tile that some row of an item sees, [begin, end).
struct TileKeys {
  std::int64_t slot;
  std::int64_t kv_head;
  std::int64_t tile;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t last;  // what the item sees of the sequence ends here
};

// Where the keys that follow `key` by a tile are: worth a hint while `key` is at work. Null if
// there are none.
inline const std::byte* NextTile(const GqaAttentionParams& p, const TileKeys& keys,
                                 const void* blocks, std::int64_t key) {
  key += kTileKeys;
  if (key >= keys.last) return nullptr;
  const KvPlace place = PlaceOf(p, blocks, keys.slot, keys.kv_head, key);
  return place.block + place.token * std::int64_t{p.head_dim} * DTypeBytes(p.kv_dtype);
}

}  // namespace weft::kernels
