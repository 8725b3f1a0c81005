#include "kernels/cpu/dot_linear.h"

#ifdef __x86_64__
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "kernels/cpu/dot_products.h"
#include "kernels/cpu/panel.h"
#include "server/base/ceil_div.h"

namespace weft::kernels {
namespace {

// A tile's sums, beside a pair of panels and a broadcast x: 27 of 32 registers.
constexpr std::int64_t kTileRows = 12;
constexpr std::int64_t kTilePanels = 2;
static_assert(kDotRows % kTileRows == 0);
constexpr std::int64_t kLine = 64;
// Up to kStreamedRows one panel after the other streams from memory: by itself, then with a hint
// this far ahead. With more the next panels are fetched to L2 meanwhile.
constexpr std::int64_t kUnhintedRows = 3;
constexpr std::int64_t kAheadBytes = 16384;
static_assert(kStreamedRows == kTileRows);
// Values of x that a thread has rounded at a time, but for what pads its rows.
constexpr std::int64_t kRounded = 108 * 1024;

// Tiles of a piece: as even as can be, since one with few rows would wait for its own additions.
std::int64_t NumTiles(std::int64_t num_rows) { return CeilDiv(num_rows, kTileRows); }
std::int64_t TileRow(std::int64_t num_rows, std::int64_t tile) {
  return num_rows * tile / NumTiles(num_rows);
}

// Where a tile's sums are. `from_zero`: what is there does not count, they start at 0.
struct TileSums {
  float* values;  // [panels][rows][16]
  std::int64_t panel_stride;
  bool from_zero;

  AVX512_DOT __m512 Load(int panel, int row) const {
    return from_zero ? _mm512_setzero_ps()
                     : _mm512_load_ps(values + panel * panel_stride + row * kPanelWidth);
  }
  AVX512_DOT void Store(int panel, int row, __m512 sum) const {
    _mm512_store_ps(values + panel * panel_stride + row * kPanelWidth, sum);
  }
};

// What a tile reads of x. Its rows lie apart by one number, so that three of them need one
// register: a tile's would not fit.
struct TileInputs {
  const std::uint32_t* pairs;  // [rows][pairs of inputs]
  std::int64_t stride;         // pairs from row to row
  const float* scales;         // [rows][steps]; of integers
  std::int64_t scales_stride;
};

// Where the pairs of a tile's rows are, for each step of the weights.
template <int kRows>
class PairsOfRows {
 public:
  explicit PairsOfRows(const TileInputs& x) : stride_(x.stride) {
    for (int i = 0; i < kBases; ++i) bases_[i] = x.pairs + 3 * i * stride_;
  }

  // Input pair `pair` of row `row`, in all lanes.
  AVX512_DOT __m512i operator()(int row, int pair) const {
    return _mm512_set1_epi32(static_cast<int>((bases_[row / 3] + row % 3 * stride_)[pair]));
  }
  void Advance(int pairs) {
    for (int i = 0; i < kBases; ++i) {
      bases_[i] += pairs;
      // Hides that bases have to do with each other, or a register would be taken for each row.
      __asm__("" : "+r"(bases_[i]));
    }
  }

 private:
  static constexpr int kBases = (kRows + 2) / 3;
  const std::uint32_t* bases_[kBases];
  std::int64_t stride_;
};

// Weights of bfloat16: a step is a pair of inputs.
struct BFloat16Dots {
  static constexpr std::int64_t kStepInputs = 2;
  static constexpr std::int64_t kStepBytes = 4 * kPanelWidth;
  static constexpr std::int64_t kBlockInputs = kPanelWidth;  // rounded at a time

  // Rounds up to 16 inputs, and zeros past them.
  AVX512_DOT static void Round(const float* x, std::int64_t count, std::uint32_t* pairs,
                               float* /*scale*/) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs),
                       (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(FirstLanes(count), x)));
  }

  template <int kRows, int kPanels, bool kHint>
  AVX512_DOT static void Tile(TileInputs x, std::int64_t num_steps, const std::byte* panel,
                              std::int64_t panel_stride, TileSums sums, const std::byte* next,
                              std::int64_t next_step) {
    __m512 sum[kPanels][kRows];
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) sum[p][r] = sums.Load(p, r);
    }
    PairsOfRows<kRows> pairs(x);
    for (std::int64_t k = 0; k < num_steps; ++k, pairs.Advance(1), panel += kStepBytes) {
      if constexpr (kHint) {
        __builtin_prefetch(next, 0, 2);
        next += next_step;
      }
      __m512bh w[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        w[p] = (__m512bh)_mm512_loadu_si512(panel + p * panel_stride);
      }
      for (int r = 0; r < kRows; ++r) {
        const auto pair = (__m512bh)pairs(r, 0);
        for (int p = 0; p < kPanels; ++p) sum[p][r] = _mm512_dpbf16_ps(sum[p][r], w[p], pair);
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) sums.Store(p, r, sum[p][r]);
    }
  }
};

// Weights of int8 or int4: a step is a group.
template <WeightFormat kFormat>
struct IntegerDots {
  static constexpr std::int64_t kStepInputs = kQuantGroup;
  static constexpr std::int64_t kStepBytes = GroupBytes(kFormat);
  static constexpr std::int64_t kBlockInputs = kQuantGroup;
  static constexpr int kPairs = kQuantGroup / 2;

  AVX512_DOT static void Round(const float* x, std::int64_t count, std::uint32_t* pairs,
                               float* scale) {
    constexpr float kLargest = 32767;
    const __m512 low = _mm512_maskz_loadu_ps(FirstLanes(std::min<std::int64_t>(16, count)), x);
    const __m512 high =
        count <= 16 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(FirstLanes(count - 16), x + 16);
    const float largest =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __mmask16 nan = _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
    *scale = nan != 0 ? std::numeric_limits<float>::quiet_NaN() : largest / kLargest;
    const __m512 inverse = _mm512_set1_ps(largest == 0 ? 0 : kLargest / largest);
    const auto store = [&](__m512 values, std::uint32_t* to) AVX512_DOT {
      const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(integers));
    };
    store(low, pairs);
    store(high, pairs + kPairs / 2);
  }

  // Inputs 2 * pair and 2 * pair + 1 of a group, as int16.
  AVX512_DOT static __m512i Load(const std::byte* group, int pair) {
    const std::byte* values = group + kScaleBytes;
    if constexpr (kFormat == WeightFormat::kInt8) {
      return _mm512_cvtepi8_epi16(_mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(values + std::int64_t{pair} * 2 * kPanelWidth)));
    } else {
      const __m512i words = _mm512_loadu_si512(values + std::int64_t{pair} / 4 * kLine);
      // Only 5 bits of an index count; the fifth belongs to the next value.
      alignas(64) static constexpr std::int16_t kValues[32] = {
          -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,
          -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, pair % 4 * 4),
                                      _mm512_load_si512(kValues));
    }
  }

  template <int kRows, int kPanels, bool kHint>
  AVX512_DOT static void Tile(TileInputs x, std::int64_t num_steps, const std::byte* panel,
                              std::int64_t panel_stride, TileSums sums, const std::byte* next,
                              std::int64_t next_step) {
    // Few sums would wait for their own additions: they are taken apart, being exact, and what a
    // group adds up to stays in registers.
    constexpr int kChains = kRows * kPanels == 1 ? 4 : kRows * kPanels <= 3 ? 2 : 1;
    constexpr bool kInRegisters = kRows * kPanels <= 6;
    __m512 total[kPanels][kRows];
    if constexpr (kInRegisters) {
      for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) total[p][r] = sums.Load(p, r);
      }
    }
    PairsOfRows<kRows> pairs(x);
    for (std::int64_t k = 0; k < num_steps; ++k, pairs.Advance(kPairs), panel += kStepBytes) {
      if constexpr (kHint) {
        const std::byte* const end = next + next_step;
        for (; next < end; next += kLine) __builtin_prefetch(next, 0, 2);
        next = end;
      }
      __m512i sum[kChains][kPanels][kRows];
      for (int c = 0; c < kChains; ++c) {
        for (int p = 0; p < kPanels; ++p) {
          for (int r = 0; r < kRows; ++r) sum[c][p][r] = _mm512_setzero_si512();
        }
      }
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) {
        __m512i w[kPanels];
        for (int p = 0; p < kPanels; ++p) {
          w[p] = Load(panel + p * panel_stride, pair);
        }
        for (int r = 0; r < kRows; ++r) {
          const __m512i input = pairs(r, pair);
          for (int p = 0; p < kPanels; ++p) {
            __m512i& chain = sum[pair % kChains][p][r];
            chain = _mm512_dpwssd_epi32(chain, w[p], input);
          }
        }
      }
      for (int p = 0; p < kPanels; ++p) {
        const __m512 scale = _mm512_cvtph_ps(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + p * panel_stride)));
        for (int r = 0; r < kRows; ++r) {
          const __m512 factor =
              _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[r * x.scales_stride + k]));
          for (int c = 1; c < kChains; ++c) {
            sum[0][p][r] = _mm512_add_epi32(sum[0][p][r], sum[c][p][r]);
          }
          const __m512 value = _mm512_cvtepi32_ps(sum[0][p][r]);
          if constexpr (kInRegisters) {
            total[p][r] = _mm512_fmadd_ps(value, factor, total[p][r]);
          } else {
            sums.Store(p, r, _mm512_fmadd_ps(value, factor, sums.Load(p, r)));
          }
        }
      }
      sums.from_zero = false;
    }
    if constexpr (kInRegisters) {
      for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < kRows; ++r) sums.Store(p, r, total[p][r]);
      }
    }
  }
};

// x[row][first, first + depth) of a piece's rows, rounded; past the last input zeros. A thread
// keeps it from piece to piece of a product.
struct RoundedRows {
  static constexpr std::int64_t kMaxPadding = 32;  // pairs a row
  alignas(64) std::uint32_t pairs[kRounded / 2 + kDotRows * kMaxPadding];
  float scales[kRounded / kQuantGroup + kDotRows];
  std::int64_t stride = 0;  // pairs from row to row
  std::int64_t scales_stride = 0;
  std::uint64_t launch = 0;
  const LinearParams* params = nullptr;
  std::int64_t first_row = 0;
  std::int64_t first = 0;

  template <typename Dots>
  AVX512_DOT void Round(const LinearParams& p, std::uint64_t of_launch, std::int64_t row,
                        std::int64_t num_rows, std::int64_t begin, std::int64_t depth) {
    if (launch == of_launch && params == &p && first_row == row && first == begin) return;
    launch = of_launch;
    params = &p;
    first_row = row;
    first = begin;
    // An odd number of cache lines: rows a power of two apart would crowd into few sets.
    constexpr std::int64_t kLinePairs = kLine / sizeof(std::uint32_t);
    stride = (CeilDiv(depth, 2 * kLinePairs) | 1) * kLinePairs;
    scales_stride = CeilDiv(depth, kQuantGroup);
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const float* x = p.x + (row + r) * p.x_stride + begin;
      std::uint32_t* to = pairs + r * stride;
      float* const row_scales = scales + r * scales_stride;
      for (std::int64_t k = 0; k < depth; k += Dots::kBlockInputs) {
        Dots::Round(x + k, std::min(Dots::kBlockInputs, depth - k), to,
                    &row_scales[k / kQuantGroup]);
        to += Dots::kBlockInputs / 2;
      }
    }
  }

  // Of rows from the piece's `row` on.
  TileInputs From(std::int64_t row) const {
    return {.pairs = pairs + row * stride,
            .stride = stride,
            .scales = scales + row * scales_stride,
            .scales_stride = scales_stride};
  }
};

struct Sums {
  alignas(64) float values[kTilePanels * kDotRows * kPanelWidth];
};

// A few panels side by side.
struct Panels {
  const std::byte* data;
  std::int64_t stride_bytes;
  std::int64_t count;
  const std::byte* next;  // what to hint meanwhile, or null
};

// Panels times all rows of x.
template <typename Dots>
AVX512_DOT void Multiply(const RoundedRows& x, std::int64_t num_rows, std::int64_t num_steps,
                         const Panels& panels, bool from_zero, float* sums) {
  const std::int64_t tiles = NumTiles(num_rows);
  const std::int64_t next_step = panels.count * Dots::kStepBytes / tiles;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t row = TileRow(num_rows, tile);
    WithRows<kTileRows>(TileRow(num_rows, tile + 1) - row, [&](auto rows) AVX512_DOT {
      const auto run = [&](auto count, auto hint) AVX512_DOT {
        Dots::template Tile<decltype(rows)::value, decltype(count)::value, decltype(hint)::value>(
            x.From(row), num_steps, panels.data, panels.stride_bytes,
            {.values = sums + row * kPanelWidth,
             .panel_stride = kDotRows * kPanelWidth,
             .from_zero = from_zero},
            panels.next + tile * num_steps * next_step, next_step);
      };
      const auto hinted = [&](auto count) AVX512_DOT {
        if (panels.next != nullptr) {
          run(count, std::true_type());
        } else {
          run(count, std::false_type());
        }
      };
      if (panels.count == kTilePanels) {
        hinted(std::integral_constant<int, kTilePanels>());
      } else {
        hinted(std::integral_constant<int, 1>());
      }
    });
  }
}

// y = sums + bias + residual for rows [row, row + num_rows) of `count` panels.
AVX512_DOT void Store(const LinearParams& p, std::int64_t row, std::int64_t num_rows,
                      std::int64_t panel, std::int64_t count, const float* sums) {
  const std::int64_t out = panel * kPanelWidth;
  // Row by row: they lie far apart.
  for (std::int64_t r = 0; r < num_rows; ++r) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = out + i * kPanelWidth;
      const std::int64_t at = (row + r) * p.y_stride + first;
      const __mmask16 mask =
          FirstLanes(std::min<std::int64_t>(kPanelWidth, p.weight->out_features() - first));
      __m512 value = _mm512_load_ps(sums + (i * kDotRows + r) * kPanelWidth);
      if (p.bias != nullptr) {
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, p.bias + first));
      }
      if (p.residual != nullptr) {
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, p.residual + at));
      }
      _mm512_mask_storeu_ps(p.y + at, mask, value);
    }
  }
}

template <typename Dots>
AVX512_DOT void RunPiece(const LinearParams& p, const LinearPiece& piece, std::uint64_t launch) {
  const std::int64_t num_rows = piece.end_row - piece.first_row;
  const std::int64_t in_features = p.weight->in_features();
  const std::int64_t panel_bytes = PanelBytes(p.weight->in_features(), p.weight->format());
  // All inputs at once unless they are very many.
  const std::int64_t depth =
      std::min(in_features, kRounded / (Dots::kBlockInputs * num_rows) * Dots::kBlockInputs);
  const bool streamed = num_rows <= kStreamedRows;
  const bool gated = p.weight->gated();
  const std::int64_t together = streamed ? 1 : kTilePanels;  // panels that are multiplied
  const std::int64_t step = gated ? kTilePanels : together;
  // By pointer: what is in a thread's own storage is taken from every thread's stack.
  thread_local const auto rounded_rows = std::make_unique<RoundedRows>();
  RoundedRows& x = *rounded_rows;
  Sums sums;
  for (std::int64_t panel = piece.first_panel; panel < piece.end_panel; panel += step) {
    const std::int64_t count = std::min(step, piece.end_panel - panel);
    for (std::int64_t begin = 0; begin < in_features; begin += depth) {
      const std::int64_t end = std::min(in_features, begin + depth);
      const std::int64_t num_steps = CeilDiv(end - begin, Dots::kStepInputs);
      x.Round<Dots>(p, launch, piece.first_row, num_rows, begin, end - begin);
      const std::int64_t from = begin / Dots::kStepInputs * Dots::kStepBytes;
      for (std::int64_t i = 0; i < count; i += together) {
        const std::byte* data = p.weight->data() + (panel + i) * panel_bytes + from;
        Panels panels = {.data = data,
                         .stride_bytes = panel_bytes,
                         .count = std::min(together, count - i),
                         .next = nullptr};
        if (!streamed) {
          panels.next = data - from + panels.count * (panel_bytes + from);
        } else if (num_rows > kUnhintedRows) {
          panels.next = data + kAheadBytes;
        }
        Multiply<Dots>(x, num_rows, num_steps, panels, begin == 0,
                       sums.values + i * kDotRows * kPanelWidth);
      }
    }
    if (gated) {
      StoreGated(p, piece.first_row, num_rows, panel, sums.values, kDotRows * kPanelWidth);
    } else {
      Store(p, piece.first_row, num_rows, panel, count, sums.values);
    }
  }
}

}  // namespace

void DotLinearTask(const LinearParams& params, const LinearPiece& piece, std::uint64_t launch) {
  switch (params.weight->format()) {
    case WeightFormat::kInt8:
      return RunPiece<IntegerDots<WeightFormat::kInt8>>(params, piece, launch);
    case WeightFormat::kInt4:
      return RunPiece<IntegerDots<WeightFormat::kInt4>>(params, piece, launch);
    default:
      return RunPiece<BFloat16Dots>(params, piece, launch);
  }
}

}  // namespace weft::kernels
#else
#include "server/base/check.h"

namespace weft::kernels {

void DotLinearTask(const LinearParams&, const LinearPiece&, std::uint64_t) {
  CheckFailed(__FILE__, __LINE__, "HasDotProducts()", "no such CPU");
}

}  // namespace weft::kernels
#endif
