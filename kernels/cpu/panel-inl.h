// The inner loop of matrix products, for each CPU target: included by files that use Highway's
// foreach_target, once a target (hence no #pragma once).

#if defined(WEFT_KERNELS_CPU_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_PANEL_INL_H_
#undef WEFT_KERNELS_CPU_PANEL_INL_H_
#else
#define WEFT_KERNELS_CPU_PANEL_INL_H_
#endif

#include <algorithm>
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
inline constexpr int kVecs = kPanelWidth / kLanes;  // across a panel
// Accumulators of a tile, rows of x times vectors: what registers hold beside weights and x.
inline constexpr int kMaxSums = HWY_TARGET == HWY_AVX3 ? 24 : 12;
inline constexpr int kTileRows = HWY_TARGET == HWY_AVX3 ? 12
                                 : kMaxSums / kVecs > 1 ? kMaxSums / kVecs
                                                        : 1;

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

// How each storage type gives weights as floats: kDepth consecutive inputs of a panel lie together,
// Load<i> widens the i-th of them.
struct Float32Weights {
  static constexpr int kDepth = 1;
  static constexpr int kElementBytes = 4;
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kVecs]) {
    for (int v = 0; v < kVecs; ++v) {
      w[v] = hn::LoadU(PanelTag(), reinterpret_cast<const float*>(p) + v * kLanes);
    }
  }
};

struct BFloat16Weights {
  static constexpr int kDepth = 2;
  static constexpr int kElementBytes = 2;
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kVecs]) {
    const hn::RebindToUnsigned<PanelTag> du;
    for (int v = 0; v < kVecs; ++v) {
      const auto pair = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p) + v * kLanes);
      if constexpr (kInput == 0) {
        w[v] = hn::BitCast(PanelTag(), hn::ShiftLeft<16>(pair));
      } else {
        w[v] = hn::BitCast(PanelTag(), hn::And(pair, hn::Set(du, 0xFFFF0000U)));
      }
    }
  }
};

struct Float16Weights {
  static constexpr int kDepth = 1;
  static constexpr int kElementBytes = 2;
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kVecs]) {
    const hn::Rebind<hwy::float16_t, PanelTag> dh;
    for (int v = 0; v < kVecs; ++v) {
      w[v] = hn::PromoteTo(PanelTag(),
                           hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p) + v * kLanes));
    }
  }
};

// Integers, as floats without their scales, which kDepth inputs share. Load<i> gives input
// row * kInputs + i of a group.
struct Int8Weights {
  static constexpr int kDepth = kQuantGroup;
  static constexpr int kInputs = 4;
  static constexpr std::int64_t kGroupBytes = GroupBytes(WeightFormat::kInt8);
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* group, int row, PanelVec (&w)[kVecs]) {
    const hn::Rebind<std::int16_t, PanelTag> d16;
    const hn::RebindToSigned<PanelTag> d32;
    const auto* pairs = reinterpret_cast<const std::int16_t*>(group + kScaleBytes) +
                        (row * kInputs + kInput) / 2 * kPanelWidth;
    for (int v = 0; v < kVecs; ++v) {
      auto value = hn::LoadU(d16, pairs + v * kLanes);
      if constexpr (kInput % 2 == 0) value = hn::ShiftLeft<8>(value);
      w[v] = hn::ConvertTo(PanelTag(), hn::PromoteTo(d32, hn::ShiftRight<8>(value)));
    }
  }
  HWY_INLINE static PanelVec Scale(const std::byte* group, int v) {
    const hn::Rebind<hwy::float16_t, PanelTag> dh;
    const auto* scales = reinterpret_cast<const hwy::float16_t*>(group);
    return hn::PromoteTo(PanelTag(), hn::LoadU(dh, scales + v * kLanes));
  }
};

struct Int4Weights {
  static constexpr int kDepth = kQuantGroup;
  static constexpr int kInputs = 8;
  static constexpr std::int64_t kGroupBytes = GroupBytes(WeightFormat::kInt4);
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* group, int row, PanelVec (&w)[kVecs]) {
    const hn::RebindToSigned<PanelTag> d32;
    const hn::RebindToUnsigned<PanelTag> du32;
    const auto* words =
        reinterpret_cast<const std::uint32_t*>(group + kScaleBytes) + row * kPanelWidth;
    for (int v = 0; v < kVecs; ++v) {
      auto q = hn::ShiftRight<Int4Shift(kInput)>(hn::LoadU(du32, words + v * kLanes));
      if constexpr (kInput != kInputs - 1) q = hn::And(q, hn::Set(du32, 0xf));
      w[v] = hn::ConvertTo(PanelTag(), hn::Sub(hn::BitCast(d32, q), hn::Set(d32, 8)));
    }
  }
  HWY_INLINE static PanelVec Scale(const std::byte* group, int v) {
    return Int8Weights::Scale(group, v);
  }
};

// What WidenPanel() makes of either: 16 scales and [32][16] values, all floats.
struct WidenedWeights {
  static constexpr int kDepth = kQuantGroup;
  static constexpr int kInputs = 4;
  static constexpr std::int64_t kGroupBytes = (kQuantGroup + 1) * kPanelWidth * 4;
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* group, int row, PanelVec (&w)[kVecs]) {
    const auto* values =
        reinterpret_cast<const float*>(group) + (row * kInputs + kInput + 1) * kPanelWidth;
    for (int v = 0; v < kVecs; ++v) w[v] = hn::LoadU(PanelTag(), values + v * kLanes);
  }
  HWY_INLINE static PanelVec Scale(const std::byte* group, int v) {
    return hn::LoadU(PanelTag(), reinterpret_cast<const float*>(group) + v * kLanes);
  }
};

// Calls input(row, std::integral_constant<int, i>) for the inputs of a group, in order.
template <typename Weights, typename Input>
HWY_INLINE void ForEachInput(const Input& input) {
  for (int row = 0; row < kQuantGroup / Weights::kInputs; ++row) {
    [&]<int... kInput>(std::integer_sequence<int, kInput...>) HWY_ATTR
        __attribute__((always_inline)) {
      (input(row, std::integral_constant<int, kInput>()), ...);
    }
    (std::make_integer_sequence<int, Weights::kInputs>());
  }
}

template <typename Weights>
inline constexpr bool kIsQuantized = Weights::kDepth > 2;

// bfloat16 in the order of the others, as K and V are.
struct BFloat16Values {
  static constexpr int kDepth = 1;
  static constexpr int kElementBytes = 2;
  template <int kInput>
  HWY_INLINE static void Load(const std::byte* p, PanelVec (&w)[kVecs]) {
    const hn::Rebind<hwy::bfloat16_t, PanelTag> db;
    for (int v = 0; v < kVecs; ++v) {
      w[v] = hn::PromoteTo(PanelTag(),
                           hn::LoadU(db, reinterpret_cast<const hwy::bfloat16_t*>(p) + v * kLanes));
    }
  }
};

// A few panels side by side, and where their sums are.
struct PanelRun {
  const std::byte* data;
  std::int64_t stride_bytes;  // from panel to panel
  std::int64_t step_bytes;    // from kDepth inputs to the next; PanelStep() where they are dense
  std::int64_t count;
  float* acc;               // [count, rows, 16]
  std::int64_t acc_stride;  // floats from row to row
  std::int64_t acc_panel_stride;
  // What to hint while computing, since it is needed next and lies in memory; null if nothing.
  const std::byte* next = nullptr;
  std::int64_t next_bytes = 0;
};

template <typename Weights>
constexpr std::int64_t PanelStep() {
  if constexpr (kIsQuantized<Weights>) {
    return Weights::kGroupBytes;
  } else {
    return std::int64_t{Weights::kDepth} * kPanelWidth * Weights::kElementBytes;
  }
}

// sum[r] += w * x[r], x of one input.
template <int kRows>
HWY_INLINE void AddProducts(const PanelVec (&w)[kVecs], const float* HWY_RESTRICT x,
                            std::int64_t x_stride, PanelVec (&sum)[kRows][kVecs]) {
  for (int r = 0; r < kRows; ++r) {
    const PanelVec b = hn::Set(PanelTag(), x[r * x_stride]);
    for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::MulAdd(w[v], b, sum[r][v]);
  }
}

// For kPanels panels from `panel` on: acc[r][0..16) += sum over k of x[r][k] * panel[k][0..16),
// k ascending, one chain of multiply-adds a value: however rows and panels are grouped and k is
// cut, a value sees the same additions in the same order.
// `next`: hinted, next_step bytes further with each k.
template <typename Weights, int kRows, int kPanels, bool kPrefetch>
HWY_INLINE void DenseTile(const float* HWY_RESTRICT x, std::int64_t x_stride, std::int64_t depth,
                          const std::byte* HWY_RESTRICT panel, const PanelRun& run,
                          float* HWY_RESTRICT acc, const std::byte* next, std::int64_t next_step) {
  constexpr int kDepth = Weights::kDepth;
  const std::int64_t stride_bytes = run.stride_bytes;
  const std::int64_t step_bytes = run.step_bytes;
  const std::int64_t acc_stride = run.acc_stride;
  const std::int64_t acc_panel_stride = run.acc_panel_stride;
  const PanelTag d;
  PanelVec sum[kPanels][kRows][kVecs];
  const auto for_sums = [&](const auto& body) HWY_ATTR {
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) {
          body(sum[p][r][v], acc + p * acc_panel_stride + r * acc_stride + v * kLanes);
        }
      }
    }
  };
  for_sums([&](PanelVec& value, const float* at) HWY_ATTR { value = hn::LoadU(d, at); });
  const auto step = [&](auto input, std::int64_t k) HWY_ATTR {
    constexpr int kInput = decltype(input)::value;
    for (int p = 0; p < kPanels; ++p) {
      // Hides that x is broadcast again for the next panel: kept, it would take more registers
      // than there are.
      if (p > 0) __asm__("" : "+r"(x));
      PanelVec w[kVecs];
      Weights::template Load<kInput>(panel + p * stride_bytes, w);
      AddProducts<kRows>(w, x + k + kInput, x_stride, sum[p]);
    }
  };
  std::int64_t k = 0;
  for (; k + kDepth <= depth; k += kDepth, panel += step_bytes) {
    if constexpr (kPrefetch) {
      __builtin_prefetch(next, 0, 2);
      next += next_step * kDepth;
    }
    step(std::integral_constant<int, 0>(), k);
    if constexpr (kDepth == 2) {
      // Hides that the same weights are loaded again: kept, they would push sums out of registers.
      __asm__("" : "+r"(panel));
      step(std::integral_constant<int, 1>(), k);
    }
  }
  if (k < depth) step(std::integral_constant<int, 0>(), k);  // an odd depth of pairs
  for_sums([&](const PanelVec& value, float* at) HWY_ATTR { hn::StoreU(value, d, at); });
}

// As DenseTile, but for integers: a chain of multiply-adds for each group, of which the total is
// what the scale multiplies. Groups begin at multiples of kQuantGroup inputs.
template <typename Weights, int kRows, int kPanels, bool kPrefetch>
HWY_INLINE void QuantizedTile(const float* HWY_RESTRICT x, std::int64_t x_stride,
                              std::int64_t depth, const std::byte* HWY_RESTRICT panel,
                              const PanelRun& run, float* HWY_RESTRICT acc, const std::byte* next,
                              std::int64_t next_step) {
  const PanelTag d;
  const std::int64_t stride_bytes = run.stride_bytes;
  const std::int64_t acc_stride = run.acc_stride;
  const std::int64_t acc_panel_stride = run.acc_panel_stride;
  constexpr std::int64_t kLine = 64;
  for (std::int64_t k = 0; k < depth; k += kQuantGroup, panel += run.step_bytes) {
    if constexpr (kPrefetch) {
      const std::byte* const end = next + next_step * kQuantGroup;
      for (; next < end; next += kLine) __builtin_prefetch(next, 0, 2);
      next = end;
    }
    const float* group_x = x + k;
    std::int64_t group_stride = x_stride;
    float padded[kRows * kQuantGroup];
    if (depth - k < kQuantGroup) {
      std::fill_n(padded, kRows * kQuantGroup, 0.0F);
      for (int r = 0; r < kRows; ++r) {
        std::copy_n(x + r * x_stride + k, depth - k, padded + r * kQuantGroup);
      }
      group_x = padded;
      group_stride = kQuantGroup;
    }
    PanelVec sum[kPanels][kRows][kVecs];
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) sum[p][r][v] = hn::Zero(d);
      }
    }
    ForEachInput<Weights>([&](int row, auto input) HWY_ATTR __attribute__((always_inline)) {
      constexpr int kInput = decltype(input)::value;
      for (int p = 0; p < kPanels; ++p) {
        PanelVec w[kVecs];
        Weights::template Load<kInput>(panel + p * stride_bytes, row, w);
        AddProducts<kRows>(w, group_x + row * Weights::kInputs + kInput, group_stride, sum[p]);
      }
    });
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVecs; ++v) {
        const PanelVec scale = Weights::Scale(panel + p * stride_bytes, v);
        for (int r = 0; r < kRows; ++r) {
          float* const at = acc + p * acc_panel_stride + r * acc_stride + v * kLanes;
          hn::StoreU(hn::MulAdd(sum[p][r][v], scale, hn::LoadU(d, at)), d, at);
        }
      }
    }
  }
}

// DenseTile or QuantizedTile for any number of rows and panels.
template <typename Weights>
HWY_INLINE void PanelProduct(const float* HWY_RESTRICT x, std::int64_t x_stride,
                             std::int64_t num_rows, std::int64_t depth, const PanelRun& run) {
  // Widening pairs takes registers too.
  constexpr int kMostRows = Weights::kDepth >= 2 && kTileRows > 1 ? kTileRows - 1 : kTileRows;
  // Even tiles: one with few rows would wait for its own additions.
  const std::int64_t tiles = (num_rows + kMostRows - 1) / kMostRows;
  const std::int64_t next_step = run.next_bytes / (tiles * run.count * depth);
  std::int64_t row = 0;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t end = num_rows * (tile + 1) / tiles;
    WithConstant<kMostRows>(static_cast<int>(end - row), [&](auto rows) HWY_ATTR {
      constexpr int kRows = decltype(rows)::value;
      const auto panels = [&](auto num_panels, auto prefetch, std::int64_t first) HWY_ATTR {
        constexpr int kPanels = decltype(num_panels)::value;
        constexpr bool kHint = decltype(prefetch)::value;
        const std::byte* const data = run.data + first * run.stride_bytes;
        float* const acc = run.acc + first * run.acc_panel_stride + row * run.acc_stride;
        const std::byte* const next =
            kHint ? run.next + (tile * run.count + first) * depth * next_step : nullptr;
        if constexpr (kIsQuantized<Weights>) {
          QuantizedTile<Weights, kRows, kPanels, kHint>(x + row * x_stride, x_stride, depth, data,
                                                        run, acc, next, kPanels * next_step);
        } else {
          DenseTile<Weights, kRows, kPanels, kHint>(x + row * x_stride, x_stride, depth, data, run,
                                                    acc, next, kPanels * next_step);
        }
      };
      const auto hinted = [&](auto num_panels, std::int64_t first) HWY_ATTR {
        if (run.next != nullptr) {
          panels(num_panels, std::true_type(), first);
        } else {
          panels(num_panels, std::false_type(), first);
        }
      };
      std::int64_t panel = 0;
      if constexpr (2 * kRows * kVecs <= kMaxSums) {
        for (; panel + 2 <= run.count; panel += 2) hinted(std::integral_constant<int, 2>(), panel);
      }
      for (; panel < run.count; ++panel) hinted(std::integral_constant<int, 1>(), panel);
    });
    row = end;
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
