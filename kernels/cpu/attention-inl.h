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
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention_parts.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

// Widens `count` (a multiple of 8) consecutive values.
template <DType kDType>
HWY_INLINE void Widen8(const std::byte* HWY_RESTRICT in, float* HWY_RESTRICT out) {
  const hn::CappedTag<float, 8> d;
  constexpr auto kStep = static_cast<int>(hn::MaxLanes(d));
  for (int i = 0; i < 8; i += kStep) {
    if constexpr (kDType == DType::kFloat32) {
      hn::StoreU(hn::LoadU(d, reinterpret_cast<const float*>(in) + i), d, out + i);
    } else if constexpr (kDType == DType::kBFloat16) {
      const hn::Rebind<hwy::bfloat16_t, decltype(d)> db;
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(db, reinterpret_cast<const hwy::bfloat16_t*>(in) + i)),
                 d, out + i);
    } else {
      const hn::Rebind<hwy::float16_t, decltype(d)> dh;
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(in) + i)),
                 d, out + i);
    }
  }
}

// Where the K or V of `kv_head` in the block of local token `token` starts.
HWY_INLINE const std::byte* BlockOf(const GqaAttentionParams& p, const void* blocks,
                                    std::int64_t slot, std::int64_t token, std::int64_t kv_head) {
  const std::int64_t block =
      p.block_table[slot * p.max_blocks_per_seq + token / p.block_tokens_per_rank];
  const std::int64_t head_elements = std::int64_t{p.block_tokens_per_rank} * p.head_dim;
  return static_cast<const std::byte*>(blocks) +
         (block * p.num_kv_heads + kv_head) * head_elements * DTypeBytes(p.kv_dtype);
}

// K of the 16 tokens from `token` on (a multiple of 16), as [head_dim][16]; lanes at or past `end`
// are left as they are or get what the block holds.
template <DType kDType>
void LoadKPanel(const GqaAttentionParams& p, std::int64_t slot, std::int64_t kv_head,
                std::int64_t token, std::int64_t end, float* HWY_RESTRICT out) {
  constexpr int kBytes = DTypeBytes(kDType);
  const std::int32_t block_tokens = p.block_tokens_per_rank;
  if (block_tokens % 16 == 0) {
    const std::int64_t offset = token % block_tokens * p.head_dim;
    const std::byte* in = BlockOf(p, p.k_blocks, slot, token, kv_head) + offset * kBytes;
    const std::int64_t bytes_ahead = 4 * 16 * std::int64_t{p.head_dim} * kBytes;
    for (std::int64_t i = 0; i < std::int64_t{16} * p.head_dim; i += 8) {
      if (i * kBytes % 64 == 0) __builtin_prefetch(in + i * kBytes + bytes_ahead, 0, 2);
      Widen8<kDType>(in + i * kBytes, out + i);
    }
    return;
  }
  for (std::int64_t t = token; t < std::min(token + 16, end); ++t) {
    const std::byte* in = BlockOf(p, p.k_blocks, slot, t, kv_head);
    const auto at = static_cast<std::int32_t>(t % block_tokens);
    const std::int64_t first = KIndex(at, 0, p.head_dim, block_tokens);
    const std::int64_t step = KIndex(at, 1, p.head_dim, block_tokens) - first;
    for (std::int32_t dim = 0; dim < p.head_dim; ++dim) {
      out[dim * 16 + (t - token)] = LoadElement(in, first + dim * step, kDType);
    }
  }
}

// V of tokens [begin, end) of the tile from `tile` on, as [ceil(head_dim / 16)][kTileKeys][16].
template <DType kDType>
void LoadVPanels(const GqaAttentionParams& p, std::int64_t slot, std::int64_t kv_head,
                 std::int64_t tile, std::int64_t begin, std::int64_t end, float* HWY_RESTRICT out) {
  constexpr int kBytes = DTypeBytes(kDType);
  const std::int64_t row_bytes = std::int64_t{p.head_dim} * kBytes;
  for (std::int64_t token = begin; token < end;) {
    const std::int64_t at = token % p.block_tokens_per_rank;
    const std::int64_t run = std::min(end - token, p.block_tokens_per_rank - at);
    const std::byte* in = BlockOf(p, p.v_blocks, slot, token, kv_head) + at * row_bytes;
    for (std::int64_t i = 0; i < run; ++i, in += row_bytes) {
      float* row = out + (token + i - tile) * kPanelWidth;
      for (std::int64_t dim = 0; dim < p.head_dim; dim += 8) {
        if (dim * kBytes % 64 == 0) {
          __builtin_prefetch(in + dim * kBytes + kTileKeys * row_bytes, 0, 2);
        }
        Widen8<kDType>(in + dim * kBytes, row + dim / 16 * (kTileKeys * kPanelWidth) + dim % 16);
      }
    }
    token += run;
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
    const auto weight = hn::Exp(d, hn::Sub(hn::LoadU(d, scores + i), shift));
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

// The tile of keys from `tile` on, of which the rows see [begin, end) together.
template <DType kDType>
void AttendTile(const GqaAttentionParams& p, const AttentionItem& item, std::int64_t tile,
                std::int64_t begin, std::int64_t end, const AttentionScratch& scratch,
                float* HWY_RESTRICT records) {
  const std::int64_t padded_dim = PaddedDim(p.head_dim);
  const std::int64_t record_floats = RecordFloats(p.head_dim);
  const std::int64_t slot = p.row_slot[item.first_row];
  const std::int64_t num_rows = item.end_row - item.first_row;
  const std::int64_t heads = item.end_head - item.first_head;

  const std::int64_t first_key = begin / 16 * 16;
  const std::int64_t panel_floats = p.head_dim * kPanelWidth;
  std::int64_t num_panels = 0;
  for (std::int64_t key = first_key; key < end; key += 16, ++num_panels) {
    LoadKPanel<kDType>(p, slot, item.kv_head, key, end, scratch.k + num_panels * panel_floats);
  }
  for (std::int64_t i = 0; i < num_rows * heads; ++i) {
    std::fill_n(scratch.scores + i * kTileKeys, kTileKeys, 0.0F);
  }
  PanelProduct<Float32Weights>(scratch.q, p.head_dim, num_rows * heads, p.head_dim,
                               {.data = reinterpret_cast<const std::byte*>(scratch.k),
                                .stride_bytes = panel_floats * 4,
                                .count = num_panels,
                                .acc = scratch.scores + (first_key - tile),
                                .acc_stride = kTileKeys,
                                .acc_panel_stride = kPanelWidth});
  LoadVPanels<kDType>(p, slot, item.kv_head, tile, begin, end, scratch.v);

  const auto bounds = [&](std::int64_t row) {
    const std::int64_t lo = std::max<std::int64_t>(p.first_visible[item.first_row + row], tile);
    const std::int64_t hi =
        std::min<std::int64_t>(p.visible_len[item.first_row + row], tile + kTileKeys);
    return std::pair(lo - tile, std::max(lo, hi) - tile);
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
        SoftmaxStep(scores + i * kTileKeys, lo, hi, group + i * record_floats, padded_dim);
      }
      PanelProduct<Float32Weights>(
          scores + lo, kTileKeys, queries, hi - lo,
          {.data = reinterpret_cast<const std::byte*>(scratch.v + lo * kPanelWidth),
           .stride_bytes = kTileKeys * kPanelWidth * 4,
           .count = padded_dim / kPanelWidth,
           .acc = group,
           .acc_stride = record_floats,
           .acc_panel_stride = kPanelWidth});
    }
    row = end_row;
  }
}

template <DType kDType>
void AttendKeysOf(const GqaAttentionParams& p, const AttentionItem& item, std::int64_t begin,
                  std::int64_t end, const AttentionScratch& scratch, float* HWY_RESTRICT records) {
  for (std::int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
    AttendTile<kDType>(p, item, tile, std::max(begin, tile), std::min(end, tile + kTileKeys),
                       scratch, records);
  }
}

// Fills the item's records from the keys of [begin, end) that each row sees; scratch.q is ready.
void AttendKeys(const GqaAttentionParams& p, const AttentionItem& item, std::int64_t begin,
                std::int64_t end, const AttentionScratch& scratch, float* records) {
  const std::int64_t record_floats = RecordFloats(p.head_dim);
  const std::int64_t padded_dim = PaddedDim(p.head_dim);
  for (std::int64_t i = 0; i < NumQueries(item); ++i) {
    float* record = records + i * record_floats;
    std::fill_n(record, padded_dim, 0.0F);
    record[padded_dim] = -std::numeric_limits<float>::infinity();
    record[padded_dim + 1] = 0.0F;
  }
  switch (p.kv_dtype) {
    case DType::kFloat32:
      return AttendKeysOf<DType::kFloat32>(p, item, begin, end, scratch, records);
    case DType::kBFloat16:
      return AttendKeysOf<DType::kBFloat16>(p, item, begin, end, scratch, records);
    case DType::kFloat16:
      return AttendKeysOf<DType::kFloat16>(p, item, begin, end, scratch, records);
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
