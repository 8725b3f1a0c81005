// Attention over one part of the keys, for each CPU target: included by attention.cc, once a
// target (hence no #pragma once).

#if defined(WEFT_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_ATTENTION_INL_H_
#undef WEFT_KERNELS_CPU_ATTENTION_INL_H_
#else
#define WEFT_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention_parts.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

template <DType kDType>
using KvValues = std::conditional_t<
    kDType == DType::kFloat32, Float32Weights,
    std::conditional_t<kDType == DType::kBFloat16, BFloat16Values, Float16Weights>>;

// Widens `count` consecutive values, a multiple of 8.
template <DType kDType>
HWY_INLINE void Widen(const std::byte* HWY_RESTRICT in, std::int64_t count,
                      float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + kPanelWidth <= count; i += kPanelWidth) {
    PanelVec w[kVecs];
    KvValues<kDType>::template Load<0>(in + i * DTypeBytes(kDType), w);
    for (int v = 0; v < kVecs; ++v) hn::StoreU(w[v], PanelTag(), out + i + v * kLanes);
  }
  for (; i < count; ++i) out[i] = LoadElement(in, i, kDType);
}

// `count` values to what StoreElement() makes of them.
template <DType kDType>
HWY_INLINE void Narrow(const float* HWY_RESTRICT in, std::int64_t count, std::byte* out) {
  std::int64_t i = 0;
  // Other targets round halves their own way.
  if constexpr (kDType == DType::kFloat16 && (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3)) {
    const hn::Rebind<hwy::float16_t, PanelTag> dh;
    for (; i + kLanes <= count; i += kLanes) {
      hn::StoreU(hn::DemoteTo(dh, hn::LoadU(PanelTag(), in + i)), dh,
                 reinterpret_cast<hwy::float16_t*>(out) + i);
    }
  }
  for (; i < count; ++i) StoreElement(out, i, kDType, in[i]);
}

// Puts a row's K and V of one head where its slot is.
template <DType kDType>
void AppendHead(const KvAppendParams& p, std::int64_t row, std::int32_t head) {
  constexpr std::int64_t kBytes = DTypeBytes(kDType);
  const std::int64_t block = p.slots[row] / p.block_tokens_per_rank;
  const auto token = static_cast<std::int32_t>(p.slots[row] % p.block_tokens_per_rank);
  const std::int64_t start =
      (block * p.num_kv_heads + head) * std::int64_t{p.block_tokens_per_rank} * p.head_dim;
  const std::int64_t at = row * p.kv_stride + std::int64_t{head} * p.head_dim;
  alignas(64) std::byte k[kMaxLatentDim * kBytes];
  Narrow<kDType>(p.k + at, p.head_dim, k);
  const std::int64_t first = KIndex(token, 0, p.head_dim, p.block_tokens_per_rank);
  const std::int64_t step = KIndex(token, 1, p.head_dim, p.block_tokens_per_rank) - first;
  auto* to = static_cast<std::byte*>(p.k_blocks) + (start + first) * kBytes;
  for (std::int32_t dim = 0; dim < p.head_dim; ++dim, to += step * kBytes) {
    std::memcpy(to, k + dim * kBytes, kBytes);
  }
  if (p.v == nullptr) return;
  Narrow<kDType>(
      p.v + at, p.head_dim,
      static_cast<std::byte*>(p.v_blocks) + (start + VIndex(token, 0, p.head_dim)) * kBytes);
}

template <DType kDType>
void AppendRowsOf(const KvAppendParams& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int32_t head = 0; head < p.num_kv_heads; ++head) AppendHead<kDType>(p, row, head);
  }
}

void AppendRows(const KvAppendParams& p, std::int64_t begin, std::int64_t end) {
  WithDType(p.kv_dtype,
            [&](auto dtype) HWY_ATTR { AppendRowsOf<decltype(dtype)::value>(p, begin, end); });
}

// K of keys [begin, end) of the tile from `tile` on as panels [kTileKeys / 16][head_dim][16]. Lanes
// outside get what the block holds, or keep what they have.
template <DType kDType>
void WidenK(const GqaAttentionParams& p, std::int64_t slot, std::int64_t kv_head, std::int64_t tile,
            std::int64_t begin, std::int64_t end, float* HWY_RESTRICT out) {
  const std::int64_t dim = p.head_dim;
  const std::int64_t first = begin / kPanelWidth * kPanelWidth;
  const auto body = [&](std::int64_t key, std::int64_t stop, const KvPlace& place) HWY_ATTR {
    if (p.block_tokens_per_rank % kPanelWidth == 0) {
      const std::int64_t panels = (stop - key + kPanelWidth - 1) / kPanelWidth;
      Widen<kDType>(place.block + place.token * dim * DTypeBytes(kDType),
                    panels * kPanelWidth * dim, out + (key - tile) * dim);
      return;
    }
    for (std::int32_t token = place.token; key < stop; ++key, ++token) {
      const std::int64_t from = KIndex(token, 0, p.head_dim, p.block_tokens_per_rank);
      const std::int64_t step = KIndex(token, 1, p.head_dim, p.block_tokens_per_rank) - from;
      const std::int64_t lane = (key - tile) % kPanelWidth;
      float* to = out + (key - tile - lane) * dim + lane;
      for (std::int64_t i = 0; i < dim; ++i) {
        to[i * kPanelWidth] = LoadElement(place.block, from + i * step, kDType);
      }
    }
  };
  ForBlocks(p, p.k_blocks, slot, kv_head, first, end, body);
}

// V of keys [begin, end) of the tile from `tile` on as [kTileKeys][PaddedDim].
template <DType kDType>
void WidenV(const GqaAttentionParams& p, std::int64_t slot, std::int64_t kv_head, std::int64_t tile,
            std::int64_t begin, std::int64_t end, float* HWY_RESTRICT out) {
  const std::int64_t dim = p.head_dim;
  const std::int64_t padded = PaddedDim(dim);
  const auto body = [&](std::int64_t key, std::int64_t stop, const KvPlace& place) HWY_ATTR {
    const std::byte* in = place.block + place.token * dim * DTypeBytes(kDType);
    float* to = out + (key - tile) * padded;
    if (dim == padded) return Widen<kDType>(in, (stop - key) * dim, to);
    for (; key < stop; ++key, in += dim * DTypeBytes(kDType), to += padded) {
      Widen<kDType>(in, dim, to);
    }
  };
  ForBlocks(p, p.v_blocks, slot, kv_head, begin, end, body);
}

// V of keys [begin, end) out of the latents that scratch.k holds, as WidenV.
inline void TakeValues(const GqaAttentionParams& p, std::int64_t tile, std::int64_t begin,
                       std::int64_t end, const AttentionScratch& scratch) {
  const std::int64_t padded = PaddedDim(p.value_dim);
  for (std::int64_t key = begin - tile; key < end - tile; ++key) {
    const float* HWY_RESTRICT in =
        scratch.k + key / kPanelWidth * kPanelWidth * p.head_dim + key % kPanelWidth;
    float* HWY_RESTRICT out = scratch.v + key * padded;
    for (std::int64_t dim = 0; dim < p.value_dim; ++dim) out[dim] = in[dim * kPanelWidth];
    std::fill(out + p.value_dim, out + padded, 0.0F);
  }
}

// One query's step of the online softmax: turns scores[lo, hi) of a tile into weights relative to
// the new maximum (0 elsewhere) and scales its record, whose maximum and sum it updates.
HWY_INLINE void SoftmaxStep(float* HWY_RESTRICT scores, std::int64_t lo, std::int64_t hi,
                            float* HWY_RESTRICT record, std::int64_t padded_dim) {
  const PanelTag d;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  if (lo > 0) std::fill(scores, scores + lo, kLowest);
  if (hi < kTileKeys) std::fill(scores + hi, scores + kTileKeys, kLowest);
  auto top = hn::LoadU(d, scores);
  for (std::int64_t i = kLanes; i < kTileKeys; i += kLanes) {
    top = hn::Max(top, hn::LoadU(d, scores + i));
  }
  const float old_max = record[padded_dim];
  const float max = std::max(old_max, hn::GetLane(hn::MaxOfLanes(d, top)));
  const auto shift = hn::Set(d, max == kLowest ? 0.0F : max);
  auto sum = hn::Zero(d);
  for (std::int64_t i = 0; i < kTileKeys; i += kLanes) {
    const auto score = hn::Sub(hn::LoadU(d, scores + i), shift);
    // Of a NaN Exp() makes 0, as of a key that is not there.
    const auto weight = hn::IfThenElse(hn::IsNaN(score), score, hn::Exp(d, score));
    hn::StoreU(weight, d, scores + i);
    sum = hn::Add(sum, weight);
  }
  const float tile_sum = hn::GetLane(hn::SumOfLanes(d, sum));
  record[padded_dim] = max;
  if (max == old_max) {
    record[padded_dim + 1] += tile_sum;
    return;
  }
  const float keep = std::exp(old_max - max);
  record[padded_dim + 1] = record[padded_dim + 1] * keep + tile_sum;
  const auto factor = hn::Set(d, keep);
  for (std::int64_t i = 0; i < padded_dim; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, record + i), factor), d, record + i);
  }
}

// scores[q][key - tile] = q . k, for whole panels of keys. `direct`: K is used as it lies in
// memory, not widened first.
template <DType kDType>
void Scores(const GqaAttentionParams& p, const TileKeys& keys, bool direct,
            std::int64_t num_queries, const AttentionScratch& scratch) {
  const std::int64_t dim = p.head_dim;
  std::fill_n(scratch.scores, num_queries * kTileKeys, 0.0F);
  const std::int64_t first = keys.begin / kPanelWidth * kPanelWidth;
  const auto multiply = [&](auto values, const std::byte* data, std::int64_t key, std::int64_t stop,
                            const std::byte* next) HWY_ATTR {
    using Values = decltype(values);
    const std::int64_t stride = kPanelWidth * dim * Values::kElementBytes;
    const std::int64_t panels = (stop - key + kPanelWidth - 1) / kPanelWidth;
    PanelProduct<Values>(scratch.q, dim, num_queries, dim,
                         {.data = data,
                          .stride_bytes = stride,
                          .step_bytes = PanelStep<Values>(),
                          .count = panels,
                          .acc = scratch.scores + (key - keys.tile),
                          .acc_stride = kTileKeys,
                          .acc_panel_stride = kPanelWidth,
                          .next = next,
                          .next_bytes = panels * stride});
  };
  if (direct) {
    const auto body = [&](std::int64_t key, std::int64_t stop, const KvPlace& place) HWY_ATTR {
      const std::byte* data = place.block + place.token * dim * DTypeBytes(kDType);
      multiply(KvValues<kDType>(), data, key, stop, NextTile(p, keys, p.k_blocks, key));
    };
    ForBlocks(p, p.k_blocks, keys.slot, keys.kv_head, first, keys.end, body);
    return;
  }
  WidenK<kDType>(p, keys.slot, keys.kv_head, keys.tile, keys.begin, keys.end, scratch.k);
  const auto* data = reinterpret_cast<const std::byte*>(scratch.k + (first - keys.tile) * dim);
  multiply(Float32Weights(), data, first, keys.end, nullptr);
}

// records[q] += sum over keys [begin, end) of weights[q][key - tile] * v[key]. `direct`: as
// Scores().
template <DType kDType>
void AddValues(const GqaAttentionParams& p, const TileKeys& keys, bool direct, std::int64_t begin,
               std::int64_t end, const float* HWY_RESTRICT weights, std::int64_t num_queries,
               const AttentionScratch& scratch, float* HWY_RESTRICT records) {
  const std::int64_t padded = PaddedDim(p.value_dim);
  const auto multiply = [&](auto values, const std::byte* data, std::int64_t key, std::int64_t stop,
                            const std::byte* next) HWY_ATTR {
    using Values = decltype(values);
    const std::int64_t row_bytes = padded * Values::kElementBytes;
    PanelProduct<Values>(weights + (key - keys.tile), kTileKeys, num_queries, stop - key,
                         {.data = data,
                          .stride_bytes = kPanelWidth * Values::kElementBytes,
                          .step_bytes = row_bytes,
                          .count = padded / kPanelWidth,
                          .acc = records,
                          .acc_stride = RecordFloats(p.value_dim),
                          .acc_panel_stride = kPanelWidth,
                          .next = next,
                          .next_bytes = (stop - key) * row_bytes});
  };
  if (direct) {
    const auto body = [&](std::int64_t key, std::int64_t stop, const KvPlace& place) HWY_ATTR {
      const std::byte* data = place.block + place.token * padded * DTypeBytes(kDType);
      multiply(KvValues<kDType>(), data, key, stop, NextTile(p, keys, p.v_blocks, key));
    };
    ForBlocks(p, p.v_blocks, keys.slot, keys.kv_head, begin, end, body);
    return;
  }
  const auto* data = reinterpret_cast<const std::byte*>(scratch.v + (begin - keys.tile) * padded);
  multiply(Float32Weights(), data, begin, end, nullptr);
}

// The keys of one tile for all rows of an item.
template <DType kDType>
void AttendTile(const GqaAttentionParams& p, const AttentionItem& item, const TileKeys& keys,
                const AttentionScratch& scratch, float* HWY_RESTRICT records) {
  const std::int64_t tile = keys.tile;
  const std::int64_t padded = PaddedDim(p.value_dim);
  const std::int64_t record_floats = RecordFloats(p.value_dim);
  const bool latent = p.v_blocks == nullptr;
  const std::int64_t num_rows = item.end_row - item.first_row;
  const std::int64_t heads = item.end_head - item.first_head;
  // Few queries: one or two passes, which widening would only prolong.
  const bool direct = !latent && num_rows * heads <= 2 * kTileRows && padded == p.head_dim &&
                      p.block_tokens_per_rank % kPanelWidth == 0;
  Scores<kDType>(p, keys, direct, num_rows * heads, scratch);
  if (latent) {
    TakeValues(p, tile, keys.begin, keys.end, scratch);
  } else if (!direct) {
    WidenV<kDType>(p, keys.slot, keys.kv_head, tile, keys.begin, keys.end, scratch.v);
  }

  const auto bounds = [&](std::int64_t row) {
    const std::int64_t lo = std::max<std::int64_t>(p.first_visible[item.first_row + row], tile);
    const std::int64_t hi =
        std::min<std::int64_t>(p.visible_len[item.first_row + row], tile + kTileKeys);
    return std::pair(lo, std::max(lo, hi));
  };
  // Rows that see the same keys go together: all of them but on the diagonal.
  for (std::int64_t row = 0; row < num_rows;) {
    const auto [lo, hi] = bounds(row);
    std::int64_t end_row = row + 1;
    while (end_row < num_rows && bounds(end_row) == std::pair(lo, hi)) ++end_row;
    if (lo < hi) {
      float* scores = scratch.scores + row * heads * kTileKeys;
      float* group = records + row * heads * record_floats;
      const std::int64_t queries = (end_row - row) * heads;
      for (std::int64_t i = 0; i < queries; ++i) {
        SoftmaxStep(scores + i * kTileKeys, lo - tile, hi - tile, group + i * record_floats,
                    padded);
      }
      AddValues<kDType>(p, keys, direct, lo, hi, scores, queries, scratch, group);
    }
    row = end_row;
  }
}

// Adds the keys of a tile that each row sees to the item's records; scratch.q is ready.
void AttendKeys(const GqaAttentionParams& p, const AttentionItem& item, const TileKeys& keys,
                const AttentionScratch& scratch, float* records) {
  WithDType(p.kv_dtype, [&](auto dtype) HWY_ATTR {
    AttendTile<decltype(dtype)::value>(p, item, keys, scratch, records);
  });
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
