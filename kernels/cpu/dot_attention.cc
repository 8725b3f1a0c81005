#include "kernels/cpu/dot_attention.h"

#ifdef __x86_64__
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/dot_products.h"
#include "server/base/ceil_div.h"

namespace weft::kernels {
namespace {

constexpr std::int64_t kLanes = 16;
// A tile's sums, w and a broadcast x are in 32 registers. With few rows more panels are side by
// side, lest sums wait for their own additions.
constexpr int kMostPanels = 4;
constexpr int kMostRows = 6;
// Queries that take K and V as they lie in memory: with more, each of several tiles of rows would
// load them again.
constexpr int kDirectPanels = 2;
constexpr int kDirectRows = 12;
constexpr std::int64_t kLine = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// 16 values of each of two rows as pairs of bfloat16, (a[i], b[i]).
AVX512_DOT inline __m512i Interleave(__m512i halves) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

AVX512_DOT inline __m512i Pairs(__m512 a, __m512 b) {
  return Interleave((__m512i)_mm512_cvtne2ps_pbh(b, a));
}

template <DType kDType>
AVX512_DOT inline __m512i LoadPairs(const std::byte* a, const std::byte* b) {
  if constexpr (kDType == DType::kFloat32) {
    return Pairs(_mm512_loadu_ps(a), _mm512_loadu_ps(b));
  } else {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    if constexpr (kDType == DType::kFloat16) {
      return Pairs(_mm512_cvtph_ps(low), _mm512_cvtph_ps(high));
    } else {
      return Interleave(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
  }
}

// K of keys [begin, end) of a tile, by pairs of dims: [kTileKeys / 16][head_dim / 2][16]. Lanes
// outside get what the block holds, or zero.
template <DType kDType>
AVX512_DOT void LoadK(const GqaAttentionParams& p, const TileKeys& keys, std::uint32_t* out) {
  constexpr std::int64_t kBytes = DTypeBytes(kDType);
  const std::int64_t dim = p.head_dim;
  const std::int64_t first = keys.begin / kLanes * kLanes;
  if (p.block_tokens_per_rank % kLanes != 0) {
    for (std::int64_t panel = first; panel < keys.end; panel += kLanes) {
      alignas(64) float values[kMaxHeadDim][kLanes] = {};
      for (std::int64_t key = std::max(panel, keys.begin); key < std::min(panel + kLanes, keys.end);
           ++key) {
        const KvPlace place = PlaceOf(p, p.k_blocks, keys.slot, keys.kv_head, key);
        for (std::int32_t i = 0; i < p.head_dim; ++i) {
          values[i][key - panel] = LoadElement(
              place.block, KIndex(place.token, i, p.head_dim, p.block_tokens_per_rank), kDType);
        }
      }
      std::uint32_t* const to = out + (panel - keys.tile) * dim / 2;
      for (std::int64_t i = 0; i < dim; i += 2) {
        _mm512_storeu_si512(to + i / 2 * kLanes,
                            Pairs(_mm512_load_ps(values[i]), _mm512_load_ps(values[i + 1])));
      }
    }
    return;
  }
  const auto body = [&](std::int64_t key, std::int64_t stop, const KvPlace& place) AVX512_DOT {
    const std::byte* in = place.block + place.token * dim * kBytes;
    const std::byte* next = NextTile(p, keys, p.k_blocks, key);
    std::uint32_t* to = out + (key - keys.tile) * dim / 2;
    const std::int64_t steps = CeilDiv(stop - key, kLanes) * dim / 2;
    for (std::int64_t i = 0; i < steps; ++i, in += 2 * kLanes * kBytes, to += kLanes) {
      if (next != nullptr) __builtin_prefetch(next + i * 2 * kLanes * kBytes, 0, 2);
      _mm512_storeu_si512(to, LoadPairs<kDType>(in, in + kLanes * kBytes));
    }
  };
  ForBlocks(p, p.k_blocks, keys.slot, keys.kv_head, first, keys.end, body);
}

// V of a tile's tokens: where it is, and what is worth a hint meanwhile.
struct ValueRows {
  const std::byte* rows[kTileKeys];
  const std::byte* next[kTileKeys];
};

// Of keys [begin, end): zeros outside.
template <DType kDType>
ValueRows FindV(const GqaAttentionParams& p, const TileKeys& keys, std::int64_t begin,
                std::int64_t end) {
  alignas(64) static constexpr std::byte kZeros[kMaxHeadDim * sizeof(float)] = {};
  const std::int64_t row_bytes = std::int64_t{p.head_dim} * DTypeBytes(kDType);
  ValueRows v;
  std::fill_n(v.rows, kTileKeys, kZeros);
  std::fill_n(v.next, kTileKeys, kZeros);
  ForBlocks(p, p.v_blocks, keys.slot, keys.kv_head, begin, end,
            [&](std::int64_t key, std::int64_t stop, const KvPlace& place) {
              const std::byte* row = place.block + place.token * row_bytes;
              const std::byte* const next = NextTile(p, keys, p.v_blocks, key);
              const std::byte* hint = next == nullptr ? row : next;
              for (; key < stop; ++key, row += row_bytes, hint += row_bytes) {
                v.rows[key - keys.tile] = row;
                v.next[key - keys.tile] = hint;
              }
            });
  return v;
}

// V of keys [begin, end) of a tile, by pairs of tokens: [kTileKeys / 2][PaddedDim], zero outside.
template <DType kDType>
AVX512_DOT void LoadV(const GqaAttentionParams& p, const TileKeys& keys, std::int64_t begin,
                      std::int64_t end, std::uint32_t* out) {
  constexpr std::int64_t kBytes = DTypeBytes(kDType);
  const std::int64_t dim = p.head_dim;
  const std::int64_t padded = PaddedDim(dim);
  const ValueRows v = FindV<kDType>(p, keys, begin, end);
  for (std::int64_t pair = (begin - keys.tile) / 2; pair < (end - keys.tile + 1) / 2; ++pair) {
    for (std::int64_t i = 0; i < dim * kBytes; i += kLine) {
      __builtin_prefetch(v.next[2 * pair] + i, 0, 2);
      __builtin_prefetch(v.next[2 * pair + 1] + i, 0, 2);
    }
    const std::byte* const a = v.rows[2 * pair];
    const std::byte* const b = v.rows[2 * pair + 1];
    std::uint32_t* const to = out + pair * padded;
    std::int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      _mm512_storeu_si512(to + i, LoadPairs<kDType>(a + i * kBytes, b + i * kBytes));
    }
    if (i < dim) {
      alignas(64) float values[2][kLanes] = {};
      for (std::int64_t j = i; j < dim; ++j) {
        values[0][j - i] = LoadElement(a, j, kDType);
        values[1][j - i] = LoadElement(b, j, kDType);
      }
      _mm512_storeu_si512(to + i, Pairs(_mm512_load_ps(values[0]), _mm512_load_ps(values[1])));
    }
  }
}

// Where a product takes its panels from: pairs k of panel `panel`.
struct LoadedPairs {
  const std::uint32_t* pairs;
  std::int64_t step;
  std::int64_t panel_stride;

  AVX512_DOT __m512i Load(std::int64_t panel, std::int64_t k) const {
    return _mm512_loadu_si512(pairs + k * step + panel * panel_stride);
  }
};

// K as it lies in memory: in tiles of 16 tokens.
template <DType kDType>
struct StoredK {
  static constexpr std::int64_t kBytes = kLanes * DTypeBytes(kDType);  // of 16 tokens' dim
  const std::byte* panels[kTileKeys / kLanes];
  const std::byte* next[kTileKeys / kLanes];

  StoredK(const GqaAttentionParams& p, const TileKeys& keys, std::int64_t first_panel) {
    for (std::int64_t key = keys.tile + first_panel * kLanes, i = 0; key < keys.end;
         key += kLanes, ++i) {
      const KvPlace place = PlaceOf(p, p.k_blocks, keys.slot, keys.kv_head, key);
      panels[i] = place.block + place.token * std::int64_t{p.head_dim} * DTypeBytes(kDType);
      next[i] = NextTile(p, keys, p.k_blocks, key);
      if (next[i] == nullptr) next[i] = panels[i];
    }
  }

  AVX512_DOT __m512i Load(std::int64_t panel, std::int64_t k) const {
    const std::byte* const at = panels[panel] + k * 2 * kBytes;
    __builtin_prefetch(next[panel] + k * 2 * kBytes, 0, 2);
    return LoadPairs<kDType>(at, at + kBytes);
  }
};

// V as it lies in memory: a token's dims together.
template <DType kDType>
struct StoredV {
  static constexpr std::int64_t kBytes = kLanes * DTypeBytes(kDType);  // of 16 dims of a token
  ValueRows v;
  std::int64_t first_pair;

  AVX512_DOT __m512i Load(std::int64_t panel, std::int64_t k) const {
    const std::int64_t row = 2 * (first_pair + k);
    __builtin_prefetch(v.next[row + panel % 2] + panel / 2 * 2 * kBytes, 0, 2);
    return LoadPairs<kDType>(v.rows[row] + panel * kBytes, v.rows[row + 1] + panel * kBytes);
  }
};

// A product of pairs: acc[row][panel][0..16) += sum over k of x[row][k] * w[panel][k][0..16). One
// chain a value, k ascending, however rows and panels are grouped and k is cut.
struct Product {
  const std::uint32_t* x;  // [rows][x_stride]
  std::int64_t x_stride;
  std::int64_t num_rows;
  std::int64_t num_pairs;
  std::int64_t num_panels;
  float* acc;
  std::int64_t acc_stride;  // from row to row; panels lie side by side
  bool from_zero;           // what acc holds does not count
};

template <int kRows, int kPanels, typename Panels>
AVX512_DOT void MultiplyTile(const Product& m, const Panels& w, std::int64_t row,
                             std::int64_t panel) {
  float* const acc = m.acc + row * m.acc_stride + panel * kLanes;
  __m512 sum[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      sum[r][p] =
          m.from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * m.acc_stride + p * kLanes);
    }
  }
  const std::uint32_t* x = m.x + row * m.x_stride;
  for (std::int64_t k = 0; k < m.num_pairs; ++k, ++x) {
    __m512bh values[kPanels];
    for (int p = 0; p < kPanels; ++p) values[p] = (__m512bh)w.Load(panel + p, k);
    for (int r = 0; r < kRows; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * m.x_stride]));
      for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], values[p], pair);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      _mm512_storeu_ps(acc + r * m.acc_stride + p * kLanes, sum[r][p]);
    }
  }
}

template <int kRows, int kPanels, typename Panels>
AVX512_DOT void MultiplyTiles(const Product& m, const Panels& w) {
  const std::int64_t tiles = CeilDiv(m.num_rows, kRows);
  for (std::int64_t panel = 0; panel < m.num_panels;) {
    const std::int64_t panels = std::min<std::int64_t>(kPanels, m.num_panels - panel);
    WithRows<kPanels>(panels, [&](auto count) AVX512_DOT {
      // Even tiles: one with few rows would wait for its own additions.
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t row = m.num_rows * tile / tiles;
        WithRows<kRows>(m.num_rows * (tile + 1) / tiles - row, [&](auto rows) AVX512_DOT {
          MultiplyTile<decltype(rows)::value, decltype(count)::value>(m, w, row, panel);
        });
      }
    });
    panel += panels;
  }
}

template <typename Panels>
AVX512_DOT void Multiply(const Product& m, const Panels& w) {
  MultiplyTiles<kMostRows, kMostPanels>(m, w);
}

// Of up to kDirectRows rows: each panel is loaded once.
template <typename Panels>
AVX512_DOT void MultiplyOnce(const Product& m, const Panels& w) {
  if (m.num_rows <= kMostRows) return Multiply(m, w);
  MultiplyTiles<kDirectRows, kDirectPanels>(m, w);
}

// 2^(x - shift) to 3e-6 of it, with a mantissa that does not depend on `shift`, an integer; a NaN
// stays one.
AVX512_DOT inline __m512 Exp2(__m512 x, __m512 shift) {
  // Minimax of 2^r on [-0.5, 0.5].
  constexpr float kTerms[] = {0.99999928F, 0.69312179F, 0.24024744F, 0.055917863F, 0.0095701022F};
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 value = _mm512_set1_ps(kTerms[4]);
  for (int i = 3; i >= 0; --i) value = _mm512_fmadd_ps(value, r, _mm512_set1_ps(kTerms[i]));
  return _mm512_scalef_ps(value, _mm512_sub_ps(whole, shift));
}

// One query's step of the online softmax of scores in base 2: scores[lo, hi) become weights,
// pairs in the first half of their memory, 0 where unseen or -inf. They are relative to the
// largest score so far, rounded up to an integer: so that a weight is rounded alike whatever other
// scores there are, and layouts differ by the order of sums alone. record[padded_dim + 2] is that
// integer, record[padded_dim] the same in base e.
AVX512_DOT void SoftmaxStep(float* scores, std::int64_t lo, std::int64_t hi, float* record,
                            std::int64_t padded_dim) {
  constexpr int kVectors = kTileKeys / kLanes;
  constexpr float kLn2 = 0.693147181F;
  const std::uint64_t below_hi = hi == kTileKeys ? ~std::uint64_t{0} : (std::uint64_t{1} << hi) - 1;
  const std::uint64_t seen = lo == kTileKeys ? 0 : below_hi >> lo << lo;
  // Finite, so that nothing is taken from infinity: 2^kFloor is 0 beside any other score.
  constexpr float kFloor = std::numeric_limits<float>::lowest();
  const __m512 lowest = _mm512_set1_ps(kFloor);
  __m512 score[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    // In this order a NaN stays one.
    score[i] = _mm512_max_ps(
        lowest, _mm512_mask_loadu_ps(lowest, static_cast<__mmask16>(seen >> (i * kLanes)),
                                     scores + i * kLanes));
  }
  const float top = std::ceil(_mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]))));
  const bool first = record[padded_dim] == kLowest;
  if (first && top == kFloor) {
    // Beside `lowest` the maximum of a NaN is lost; what it stands for is not.
    __mmask16 any = 0;
    for (int i = 0; i < kVectors; ++i) any |= _mm512_cmp_ps_mask(score[i], lowest, _CMP_NEQ_UQ);
    if (any == 0) {
      _mm512_storeu_si512(scores, _mm512_setzero_si512());
      _mm512_storeu_si512(scores + kLanes, _mm512_setzero_si512());
      return;
    }
  }
  const float old_max = record[padded_dim + 2];
  const float max = first ? top : std::max(old_max, top);
  const __m512 shift = _mm512_set1_ps(max);
  const auto ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < kVectors; i += 2) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(Exp2(score[i + 1], shift), Exp2(score[i], shift));
    _mm512_storeu_si512(scores + i * kLanes / 2, (__m512i)rounded);
    sum = _mm512_dpbf16_ps(sum, rounded, ones);
  }
  const float tile_sum = _mm512_reduce_add_ps(sum);
  record[padded_dim] = max * kLn2;
  record[padded_dim + 2] = max;
  if (first || max == old_max) {
    record[padded_dim + 1] += tile_sum;
    return;
  }
  const float keep = std::exp2(old_max - max);
  record[padded_dim + 1] = record[padded_dim + 1] * keep + tile_sum;
  const __m512 factor = _mm512_set1_ps(keep);
  for (std::int64_t i = 0; i < padded_dim; i += kLanes) {
    _mm512_storeu_ps(record + i, _mm512_mul_ps(_mm512_loadu_ps(record + i), factor));
  }
}

// Whether no value of V is infinite or NaN: then what a row may not see is nothing times its zero
// weight.
AVX512_DOT bool AllFinite(const std::uint32_t* pairs, std::int64_t count) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 bad = 0;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const __m512i value = _mm512_and_si512(_mm512_loadu_si512(pairs + i), exponent);
    bad |= _mm512_cmpeq_epi16_mask(value, exponent);
  }
  return bad == 0;
}

// The keys of one tile for all rows of an item.
template <DType kDType>
AVX512_DOT void AttendTile(const GqaAttentionParams& p, const AttentionItem& item,
                           const TileKeys& keys, const AttentionScratch& scratch, float* records) {
  const std::int64_t dim = p.head_dim;
  const std::int64_t padded = PaddedDim(dim);
  const std::int64_t record_floats = RecordFloats(dim);
  const std::int64_t num_rows = item.end_row - item.first_row;
  const std::int64_t heads = item.end_head - item.first_head;
  const auto bounds = [&](std::int64_t row) {
    const auto in_tile = [&](std::int64_t key) {
      return std::clamp(key, keys.tile, keys.tile + kTileKeys);
    };
    return std::pair(in_tile(p.first_visible[item.first_row + row]),
                     in_tile(p.visible_len[item.first_row + row]));
  };
  bool together = true;  // all rows see all of these keys
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto [lo, hi] = bounds(row);
    together = together && lo <= keys.begin && hi >= keys.end;
  }
  // Few queries take K and V as they lie in memory: loading them first would only prolong that.
  const bool direct = together && num_rows * heads <= kDirectRows && dim == padded &&
                      p.block_tokens_per_rank % kLanes == 0;

  const std::int64_t first_panel = (keys.begin - keys.tile) / kLanes;
  const Product scores = {.x = reinterpret_cast<const std::uint32_t*>(scratch.q),
                          .x_stride = dim / 2,
                          .num_rows = num_rows * heads,
                          .num_pairs = dim / 2,
                          .num_panels = CeilDiv(keys.end - keys.tile, kLanes) - first_panel,
                          .acc = scratch.scores + first_panel * kLanes,
                          .acc_stride = kTileKeys,
                          .from_zero = true};
  if (direct) {
    MultiplyOnce(scores, StoredK<kDType>(p, keys, first_panel));
  } else {
    auto* const k = reinterpret_cast<std::uint32_t*>(scratch.k);
    LoadK<kDType>(p, keys, k);
    Multiply(scores, LoadedPairs{.pairs = k + first_panel * kLanes * dim / 2,
                                 .step = kLanes,
                                 .panel_stride = kLanes * dim / 2});
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto [lo, hi] = bounds(row);
    for (std::int64_t i = row * heads; i < (row + 1) * heads; ++i) {
      SoftmaxStep(scratch.scores + i * kTileKeys, lo - keys.tile, hi - keys.tile,
                  records + i * record_floats, padded);
    }
  }

  // Of rows [row, row + count) and keys [begin, end).
  const auto values = [&](std::int64_t row, std::int64_t count, std::int64_t begin,
                          std::int64_t end) -> Product {
    const std::int64_t first = (begin - keys.tile) / 2;
    const auto* const weights = reinterpret_cast<const std::uint32_t*>(scratch.scores);
    return {.x = weights + row * heads * kTileKeys + first,
            .x_stride = kTileKeys,
            .num_rows = count * heads,
            .num_pairs = (end - keys.tile + 1) / 2 - first,
            .num_panels = padded / kLanes,
            .acc = records + row * heads * record_floats,
            .acc_stride = record_floats,
            .from_zero = false};
  };
  const Product all = values(0, num_rows, keys.begin, keys.end);
  const std::int64_t first_pair = (keys.begin - keys.tile) / 2;
  if (direct) {
    return MultiplyOnce(all, StoredV<kDType>{.v = FindV<kDType>(p, keys, keys.begin, keys.end),
                                             .first_pair = first_pair});
  }
  auto* const v = reinterpret_cast<std::uint32_t*>(scratch.v);
  const auto loaded = [&](std::int64_t pair) -> LoadedPairs {
    return {.pairs = v + pair * padded, .step = padded, .panel_stride = kLanes};
  };
  LoadV<kDType>(p, keys, keys.begin, keys.end, v);
  if (together || AllFinite(v + first_pair * padded, all.num_pairs * padded)) {
    return Multiply(all, loaded(first_pair));
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const auto [lo, hi] = bounds(row);
    if (lo >= hi) continue;
    LoadV<kDType>(p, keys, lo, hi, v);
    Multiply(values(row, 1, lo, hi), loaded((lo - keys.tile) / 2));
  }
}

}  // namespace

AVX512_DOT void RoundToPairs(float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const __m512 v = _mm512_maskz_loadu_ps(FirstLanes(std::min(kLanes, count - i)), values + i);
    _mm256_mask_storeu_epi32(values + i / 2,
                             static_cast<__mmask8>(FirstLanes(std::min(kLanes, count - i) / 2)),
                             (__m256i)_mm512_cvtneps_pbh(v));
  }
}

void DotAttendKeys(const GqaAttentionParams& p, const AttentionItem& item, const TileKeys& keys,
                   const AttentionScratch& scratch, float* records) {
  WithDType(p.kv_dtype, [&](auto dtype) {
    AttendTile<decltype(dtype)::value>(p, item, keys, scratch, records);
  });
}

}  // namespace weft::kernels
#else
#include "server/base/check.h"

namespace weft::kernels {

void RoundToPairs(float*, std::int64_t) {
  CheckFailed(__FILE__, __LINE__, "HasDotProducts()", "no such CPU");
}

void DotAttendKeys(const GqaAttentionParams&, const AttentionItem&, const TileKeys&,
                   const AttentionScratch&, float*) {
  CheckFailed(__FILE__, __LINE__, "HasDotProducts()", "no such CPU");
}

}  // namespace weft::kernels
#endif
