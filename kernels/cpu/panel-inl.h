// The inner loop of matrix products, for each CPU target: included by files that use Highway's
// foreach_target, once a target (hence no #pragma once).

#if defined(WEFT_KERNELS_CPU_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_PANEL_INL_H_
#undef WEFT_KERNELS_CPU_PANEL_INL_H_
#else
#define WEFT_KERNELS_CPU_PANEL_INL_H_
#endif

#include <cstdint>
#include <type_traits>
#include <utility>

#include "hwy/highway.h"
#include "kernels/cpu/panel.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using PanelTag = hn::CappedTag<float, kPanelWidth>;
using PanelVec = hn::Vec<PanelTag>;
inline constexpr int kLanes = hn::MaxLanes(PanelTag());
// Vectors across a panel, and rows of x that share a pass: as many accumulators as registers allow.
inline constexpr int kVecs = kPanelWidth / kLanes;
inline constexpr int kTileRows = HWY_TARGET == HWY_AVX3 ? 12 : HWY_TARGET == HWY_AVX2 ? 6 : 3;

// Calls body(std::integral_constant<int, n>) for a run-time n in [1, kMax].
template <int kMax, typename Body>
HWY_INLINE void WithConstant(int n, const Body& body) {
  if constexpr (kMax == 1) {
    body(std::integral_constant<int, 1>());
  } else {
    if (n == kMax) {
      body(std::integral_constant<int, kMax>());
    } else {
      WithConstant<kMax - 1>(n, body);
    }
  }
}

// How each storage type gives the weights of kDepth consecutive inputs of a panel as floats.
struct Float32Weights {
  static constexpr int kDepth = 1;
  static constexpr int kElementBytes = 4;
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kDepth][kVecs]) {
    for (int v = 0; v < kVecs; ++v) {
      w[0][v] = hn::LoadU(PanelTag(), reinterpret_cast<const float*>(p) + v * kLanes);
    }
  }
};

struct BFloat16Weights {
  static constexpr int kDepth = 2;
  static constexpr int kElementBytes = 2;
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kDepth][kVecs]) {
    const hn::RebindToUnsigned<PanelTag> du;
    for (int v = 0; v < kVecs; ++v) {
      const auto pair = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p) + v * kLanes);
      w[0][v] = hn::BitCast(PanelTag(), hn::ShiftLeft<16>(pair));
      w[1][v] = hn::BitCast(PanelTag(), hn::And(pair, hn::Set(du, 0xFFFF0000U)));
    }
  }
};

struct Float16Weights {
  static constexpr int kDepth = 1;
  static constexpr int kElementBytes = 2;
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kDepth][kVecs]) {
    const hn::Rebind<hwy::float16_t, PanelTag> dh;
    for (int v = 0; v < kVecs; ++v) {
      w[0][v] = hn::PromoteTo(
          PanelTag(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p) + v * kLanes));
    }
  }
};

// acc[r][0..16) += sum over k of x[r][k] * panel[k][0..16), k ascending, one fused chain a value:
// however rows are grouped and k is cut, a value sees the same additions in the same order.
template <typename Weights, int kRows>
HWY_INLINE void PanelTile(const float* HWY_RESTRICT x, std::int64_t x_stride,
                          const std::byte* HWY_RESTRICT panel, std::int64_t depth,
                          float* HWY_RESTRICT acc, std::int64_t acc_stride) {
  constexpr int kDepth = Weights::kDepth;
  constexpr int kStepBytes = kDepth * kPanelWidth * Weights::kElementBytes;
  const PanelTag d;
  PanelVec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::LoadU(d, acc + r * acc_stride + v * kLanes);
  }
  PanelVec w[kDepth][kVecs];
  std::int64_t k = 0;
  for (; k + kDepth <= depth; k += kDepth, panel += kStepBytes) {
    Weights::Load(panel, w);
    for (int i = 0; i < kDepth; ++i) {
      for (int r = 0; r < kRows; ++r) {
        const PanelVec b = hn::Set(d, x[r * x_stride + k + i]);
        for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::MulAdd(w[i][v], b, sum[r][v]);
      }
    }
  }
  if (k < depth) {  // an odd depth of pairs
    Weights::Load(panel, w);
    for (int r = 0; r < kRows; ++r) {
      const PanelVec b = hn::Set(d, x[r * x_stride + k]);
      for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::MulAdd(w[0][v], b, sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[r][v], d, acc + r * acc_stride + v * kLanes);
  }
}

// PanelTile for any number of rows.
template <typename Weights>
HWY_INLINE void PanelProduct(const float* HWY_RESTRICT x, std::int64_t x_stride,
                             std::int64_t num_rows, const std::byte* HWY_RESTRICT panel,
                             std::int64_t depth, float* HWY_RESTRICT acc, std::int64_t acc_stride) {
  // Even tiles: one with few rows would wait for its own additions.
  const std::int64_t tiles = (num_rows + kTileRows - 1) / kTileRows;
  std::int64_t row = 0;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t end = num_rows * (tile + 1) / tiles;
    WithConstant<kTileRows>(static_cast<int>(end - row), [&](auto rows) HWY_ATTR {
      PanelTile<Weights, decltype(rows)::value>(x + row * x_stride, x_stride, panel, depth,
                                                acc + row * acc_stride, acc_stride);
    });
    row = end;
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
