#include "kernels/cpu/bf16_dot.h"

#ifdef __x86_64__
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "kernels/cpu/panel.h"

// Of each function, not of the file: what the linker may share with others is for any CPU.
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace weft::kernels {
namespace {

// A tile's sums, beside a pair of panels and a broadcast x: 27 of 32 registers.
constexpr std::int64_t kTileRows = 12;
constexpr std::int64_t kTilePanels = 2;
constexpr std::int64_t kPairBytes = 4 * kPanelWidth;  // two inputs of a panel
// Up to kStreamedRows one panel after the other streams from memory: by itself, then with a hint
// this far ahead. With more the next panels are fetched to L2 meanwhile.
constexpr std::int64_t kUnhintedRows = 3;
constexpr std::int64_t kAheadBytes = 16384;
constexpr std::int64_t kStreamedRows = kTileRows;
static_assert(kBf16DotRows % kTileRows == 0);
// Values of x that a thread has rounded at a time.
constexpr std::int64_t kRounded = 96 * 1024;

// Tiles of a piece: as even as can be, since one with few rows would wait for its own additions.
std::int64_t NumTiles(std::int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }
std::int64_t TileRow(std::int64_t num_rows, std::int64_t tile) {
  return num_rows * tile / NumTiles(num_rows);
}

// x[row][first, first + depth) of a piece's rows, rounded, in the order it is read: for each tile
// [pairs of inputs][rows]; an odd last input has a zero beside it. A thread keeps it from piece to
// piece of a product.
struct RoundedRows {
  std::uint32_t pairs[kRounded / 2];
  std::uint64_t launch = 0;
  const LinearParams* params = nullptr;
  std::int64_t first_row = 0;
  std::int64_t first = 0;

  AVX512_BF16 void Round(const LinearParams& p, std::uint64_t of_launch, std::int64_t row,
                         std::int64_t num_rows, std::int64_t begin, std::int64_t depth) {
    if (launch == of_launch && params == &p && first_row == row && first == begin) return;
    launch = of_launch;
    params = &p;
    first_row = row;
    first = begin;
    const std::int64_t num_pairs = (depth + 1) / 2;
    for (std::int64_t tile = 0; tile < NumTiles(num_rows); ++tile) {
      const std::int64_t tile_row = TileRow(num_rows, tile);
      const std::int64_t rows = TileRow(num_rows, tile + 1) - tile_row;
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* x = p.x + (row + tile_row + r) * p.x_stride + begin;
        std::uint32_t* to = pairs + tile_row * num_pairs + r;
        for (std::int64_t k = 0; k < depth; k += kPanelWidth) {
          const auto lanes = static_cast<unsigned>(std::min<std::int64_t>(kPanelWidth, depth - k));
          const auto mask = static_cast<__mmask16>((1U << lanes) - 1U);
          alignas(32) std::uint32_t rounded[kPanelWidth / 2];
          _mm256_store_si256(reinterpret_cast<__m256i*>(rounded),
                             (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + k)));
          for (unsigned i = 0; i < (lanes + 1) / 2; ++i, to += rows) *to = rounded[i];
        }
      }
    }
  }
};

// A few panels side by side.
struct Panels {
  const std::byte* data;
  std::int64_t stride_bytes;
  std::int64_t count;
  const std::byte* next;  // what to hint meanwhile, or null
  std::int64_t next_bytes;
};

// For kPanels panels and x[pairs][kRows]: acc[panel][row][0..16) += the products of `num_pairs`
// pairs. Hints `next`, `next_step` bytes further with each pair.
template <int kRows, int kPanels, bool kHint>
AVX512_BF16 inline void Tile(const std::uint32_t* x, std::int64_t num_pairs, const std::byte* panel,
                             std::int64_t panel_stride, float* acc, std::int64_t acc_panel_stride,
                             const std::byte* next, std::int64_t next_step) {
  __m512 sum[kPanels][kRows];
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) {
      sum[p][r] = _mm512_load_ps(acc + p * acc_panel_stride + r * kPanelWidth);
    }
  }
  for (std::int64_t k = 0; k < num_pairs; ++k, x += kRows, panel += kPairBytes) {
    if constexpr (kHint) {
      __builtin_prefetch(next, 0, 2);
      next += next_step;
    }
    __m512bh w[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      w[p] = (__m512bh)_mm512_loadu_si512(panel + p * panel_stride);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r]));
      for (int p = 0; p < kPanels; ++p) sum[p][r] = _mm512_dpbf16_ps(sum[p][r], w[p], pair);
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) {
      _mm512_store_ps(acc + p * acc_panel_stride + r * kPanelWidth, sum[p][r]);
    }
  }
}

template <int kMost, typename Body>
AVX512_BF16 inline void WithRows(std::int64_t rows, const Body& body) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return WithRows<kMost - 1>(rows, body);
  }
  body(std::integral_constant<int, kMost>());
}

struct Sums {
  alignas(64) float values[kTilePanels * kBf16DotRows * kPanelWidth];
};

// Panels times all rows of x.
AVX512_BF16 void Multiply(const RoundedRows& x, std::int64_t num_rows, std::int64_t num_pairs,
                          const Panels& panels, Sums& sums) {
  const std::int64_t tiles = NumTiles(num_rows);
  const std::int64_t next_step = panels.next_bytes / (tiles * num_pairs);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t row = TileRow(num_rows, tile);
    WithRows<kTileRows>(TileRow(num_rows, tile + 1) - row, [&](auto rows) AVX512_BF16 {
      const auto run = [&](auto count, auto hint) AVX512_BF16 {
        Tile<decltype(rows)::value, decltype(count)::value, decltype(hint)::value>(
            x.pairs + row * num_pairs, num_pairs, panels.data, panels.stride_bytes,
            sums.values + row * kPanelWidth, kBf16DotRows * kPanelWidth,
            panels.next + tile * num_pairs * next_step, next_step);
      };
      const auto hinted = [&](auto count) AVX512_BF16 {
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

// y = sums + bias + residual for rows [row, row + num_rows) of one panel.
AVX512_BF16 void Store(const LinearParams& p, std::int64_t row, std::int64_t num_rows,
                       std::int64_t panel, const float* sums) {
  const std::int64_t out = panel * kPanelWidth;
  const std::int64_t width = std::min<std::int64_t>(kPanelWidth, p.weight->out_features() - out);
  const auto mask = static_cast<__mmask16>((1U << static_cast<unsigned>(width)) - 1U);
  for (std::int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth) {
    const std::int64_t at = (row + r) * p.y_stride + out;
    __m512 value = _mm512_load_ps(sums);
    if (p.bias != nullptr) {
      value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, p.bias + out));
    }
    if (p.residual != nullptr) {
      value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, p.residual + at));
    }
    _mm512_mask_storeu_ps(p.y + at, mask, value);
  }
}

}  // namespace

AVX512_BF16 void Bf16DotTask(const LinearParams& p, const LinearPiece& piece,
                             std::uint64_t launch) {
  const std::int64_t num_rows = piece.end_row - piece.first_row;
  const std::int64_t in_features = p.weight->in_features();
  const std::int64_t panel_bytes = PanelBytes(p.weight->in_features(), WeightFormat::kBFloat16);
  // All inputs at once unless they are very many.
  const std::int64_t depth = std::min(in_features, kRounded / (2 * num_rows) * 2);
  const std::int64_t step = num_rows <= kStreamedRows ? 1 : kTilePanels;
  // By pointer: what is in a thread's own storage is taken from every thread's stack.
  thread_local const auto rounded_rows = std::make_unique<RoundedRows>();
  RoundedRows& x = *rounded_rows;
  Sums sums;
  for (std::int64_t panel = piece.first_panel; panel < piece.end_panel; panel += step) {
    const std::int64_t count = std::min(step, piece.end_panel - panel);
    const std::byte* data = p.weight->data() + panel * panel_bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      std::fill_n(sums.values + i * kBf16DotRows * kPanelWidth, num_rows * kPanelWidth, 0.0F);
    }
    for (std::int64_t begin = 0; begin < in_features; begin += depth) {
      const std::int64_t end = std::min(in_features, begin + depth);
      x.Round(p, launch, piece.first_row, num_rows, begin, end - begin);
      const std::int64_t num_pairs = (end - begin + 1) / 2;
      Panels panels = {.data = data + begin / 2 * kPairBytes,
                       .stride_bytes = panel_bytes,
                       .count = count,
                       .next = nullptr,
                       .next_bytes = count * num_pairs * kPairBytes};
      if (num_rows > kStreamedRows) {
        panels.next = data + count * (panel_bytes + begin / 2 * kPairBytes);
      } else if (num_rows > kUnhintedRows) {
        panels.next = panels.data + kAheadBytes;
      }
      Multiply(x, num_rows, num_pairs, panels, sums);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      Store(p, piece.first_row, num_rows, panel + i, sums.values + i * kBf16DotRows * kPanelWidth);
    }
  }
}

}  // namespace weft::kernels
#else
#include "server/base/check.h"

namespace weft::kernels {

void Bf16DotTask(const LinearParams&, const LinearPiece&, std::uint64_t) {
  CheckFailed(__FILE__, __LINE__, "HasBf16Dots()", "no such CPU");
}

}  // namespace weft::kernels
#endif
