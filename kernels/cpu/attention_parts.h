#pragma once

#include <cstdint>

#include "kernels/attention.h"

// How attention is cut up.

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

// A query's running result: [PaddedDim(value_dim)] weighted sum of V, then the largest score and
// the sum of exp(score - largest).
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

}  // namespace weft::kernels
