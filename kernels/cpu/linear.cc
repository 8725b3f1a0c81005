#include "kernels/linear.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/dot_linear.h"
#include "kernels/cpu/launch.h"
#include "kernels/cpu/linear_piece.h"
#include "kernels/cpu/panel.h"
#include "kernels/device/cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/panel-inl.h"
#include "kernels/cpu/silu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

// Rows whose sums wait on the stack while pieces of a panel pass by: a piece has no more, if it has
// more than a tile of any target.
constexpr std::int64_t kMaxRowBlock = 192;
// Panels that a thread goes through together: two read streams, or as many as a tile has.
constexpr std::int64_t kDirectPanels = 2;
// Up to here widening costs more than it saves; of integers it takes more than of halves.
template <typename Weights>
constexpr std::int64_t kDirectRows = kIsQuantized<Weights> ? 4 : 2 * kTileRows;
constexpr std::int64_t kPrefetchBytes = 4096;
constexpr std::int64_t kUnhintedRows = 3;
constexpr std::int64_t kBlockedPanels = kMaxSums / (kTileRows * kVecs) > 1 ? 2 : 1;
// Inputs that a widened piece of those panels holds: 16 KB of floats, half of L1.
constexpr std::int64_t kDepthBlock = 256 / kBlockedPanels;
static_assert(kDepthBlock % kQuantGroup == 0);

// y = acc + bias + residual for rows [row, row + num_rows) of one panel.
void StorePanel(const LinearParams& p, std::int64_t row, std::int64_t num_rows, std::int64_t panel,
                const float* HWY_RESTRICT acc) {
  const PanelTag d;
  const std::int64_t out = panel * kPanelWidth;
  const std::int64_t width = std::min<std::int64_t>(kPanelWidth, p.weight->out_features() - out);
  for (std::int64_t r = 0; r < num_rows; ++r, acc += kPanelWidth) {
    const std::int64_t at = (row + r) * p.y_stride + out;
    if (width == kPanelWidth) {
      for (int v = 0; v < kVecs; ++v) {
        PanelVec value = hn::LoadU(d, acc + v * kLanes);
        if (p.bias != nullptr) value = hn::Add(value, hn::LoadU(d, p.bias + out + v * kLanes));
        if (p.residual != nullptr) {
          value = hn::Add(value, hn::LoadU(d, p.residual + at + v * kLanes));
        }
        hn::StoreU(value, d, p.y + at + v * kLanes);
      }
      continue;
    }
    for (std::int64_t i = 0; i < width; ++i) {
      float value = acc[i];
      if (p.bias != nullptr) value += p.bias[out + i];
      if (p.residual != nullptr) value += p.residual[at + i];
      p.y[at + i] = value;
    }
  }
}

void StoreGatedPanels(const LinearParams& p, std::int64_t row, std::int64_t num_rows,
                      std::int64_t panel, const float* HWY_RESTRICT sums,
                      std::int64_t sums_stride) {
  const PanelTag d;
  const std::int64_t size = p.weight->product_features();
  const std::int64_t out = panel / 2 * kPanelWidth;
  const std::int64_t width = std::min<std::int64_t>(kPanelWidth, size - out);
  HWY_ALIGN float bias[2][kPanelWidth] = {};
  for (std::int64_t i = 0; p.bias != nullptr && i < width; ++i) {
    bias[0][i] = p.bias[out + i];
    bias[1][i] = p.bias[size + out + i];
  }
  for (std::int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth) {
    HWY_ALIGN float partial[kPanelWidth];
    float* const y = p.y + (row + r) * p.y_stride + out;
    for (int v = 0; v < kVecs; ++v) {
      const auto sum = [&](int part) HWY_ATTR {
        return hn::Add(hn::LoadU(d, sums + part * sums_stride + v * kLanes),
                       hn::Load(d, bias[part] + v * kLanes));
      };
      const PanelVec value = hn::Mul(Silu(d, sum(0)), sum(1));
      hn::StoreU(value, d, (width == kPanelWidth ? y : partial) + v * kLanes);
    }
    if (width < kPanelWidth) std::copy_n(partial, width, y);
  }
}

// Widens `depth` inputs of a panel to [depth][16] floats; integers to groups of WidenedWeights.
template <typename Weights>
void WidenPanel(const std::byte* HWY_RESTRICT panel, std::int64_t depth, float* HWY_RESTRICT out) {
  PanelVec w[kVecs];
  const auto store = [&]() HWY_ATTR {
    for (int v = 0; v < kVecs; ++v, out += kLanes) hn::StoreU(w[v], PanelTag(), out);
  };
  for (std::int64_t k = 0; k < depth; k += Weights::kDepth, panel += PanelStep<Weights>()) {
    if constexpr (kIsQuantized<Weights>) {
      for (int v = 0; v < kVecs; ++v) w[v] = Weights::Scale(panel, v);
      store();
      ForEachInput<Weights>([&](int row, auto input) HWY_ATTR {
        Weights::template Load<decltype(input)::value>(panel, row, w);
        store();
      });
    } else {
      Weights::template Load<0>(panel, w);
      store();
      if constexpr (Weights::kDepth == 2) {
        Weights::template Load<1>(panel, w);
        store();
      }
    }
  }
}

// Few rows: weights are used as they come from memory, kDirectPanels panels at a time. `acc` is
// [count, rows, 16], and zero.
template <typename Weights>
void LinearDirect(const LinearParams& p, std::int64_t count, const std::byte* data,
                  std::int64_t panel_bytes, std::int64_t row, std::int64_t num_rows, float* acc) {
  // One pass over the panels streams by itself, or with a hint close by; while it takes two, the
  // next panels can come all the way.
  const std::byte* ahead = nullptr;
  if (num_rows > kUnhintedRows) {
    ahead = data + (num_rows < kTileRows ? kPrefetchBytes : panel_bytes);
  }
  PanelProduct<Weights>(p.x + row * p.x_stride, p.x_stride, num_rows, p.weight->in_features(),
                        {.data = data,
                         .stride_bytes = panel_bytes,
                         .step_bytes = PanelStep<Weights>(),
                         .count = count,
                         .acc = acc,
                         .acc_stride = kPanelWidth,
                         .acc_panel_stride = num_rows * kPanelWidth,
                         .next = ahead,
                         .next_bytes = count * panel_bytes});
}

// Many rows: a piece of each of `count` panels at a time is widened into L1 and serves a block of
// rows. `acc` as LinearDirect()'s.
template <typename Weights>
void LinearBlocked(const LinearParams& p, std::int64_t count, const std::byte* data,
                   std::int64_t panel_bytes, std::int64_t row, std::int64_t num_rows, float* acc) {
  using Wide = std::conditional_t<kIsQuantized<Weights>, WidenedWeights, Float32Weights>;
  // Beside the inputs: an odd one's neighbour, or scales.
  constexpr std::int64_t kWideFloats = (kDepthBlock + kDepthBlock / kQuantGroup) * kPanelWidth;
  HWY_ALIGN float wide[kBlockedPanels * kWideFloats];
  const std::int64_t in_features = p.weight->in_features();
  const auto bytes_of = [](std::int64_t inputs) {
    return inputs / Weights::kDepth * PanelStep<Weights>();
  };
  const bool few = num_rows <= 4 * kTileRows;
  for (std::int64_t k = 0; k < in_features; k += kDepthBlock) {
    const std::int64_t depth = std::min(kDepthBlock, in_features - k);
    const std::byte* piece = data + bytes_of(k);
    std::int64_t piece_bytes = panel_bytes;
    if constexpr (!std::is_same_v<Weights, Float32Weights>) {
      for (std::int64_t i = 0; i < count; ++i) {
        WidenPanel<Weights>(piece + i * panel_bytes, depth, wide + i * kWideFloats);
      }
      piece = reinterpret_cast<const std::byte*>(wide);
      piece_bytes = kWideFloats * 4;
    }
    PanelProduct<Wide>(p.x + row * p.x_stride + k, p.x_stride, num_rows, depth,
                       {.data = piece,
                        .stride_bytes = piece_bytes,
                        .step_bytes = PanelStep<Wide>(),
                        .count = count,
                        .acc = acc,
                        .acc_stride = kPanelWidth,
                        .acc_panel_stride = num_rows * kPanelWidth,
                        .next = few ? data + bytes_of(k + depth) : nullptr,
                        .next_bytes = bytes_of(std::min(kDepthBlock, in_features))});
  }
}

template <typename Weights>
void LinearPanels(const LinearParams& p, const LinearPiece& piece) {
  static_assert(kDirectRows<Weights> <= kMaxRowBlock);
  constexpr std::int64_t kMostPanels = 2;
  static_assert(kDirectPanels == kMostPanels && kBlockedPanels <= kMostPanels);
  HWY_ALIGN float acc[kMostPanels * kMaxRowBlock * kPanelWidth];
  const std::int64_t panel_bytes = PanelBytes(p.weight->in_features(), p.weight->format());
  const std::int64_t num_rows = piece.end_row - piece.first_row;
  const bool direct = p.num_rows <= kDirectRows<Weights>;
  const std::int64_t panel_sums = num_rows * kPanelWidth;
  const std::int64_t step = direct || p.weight->gated() ? kMostPanels : kBlockedPanels;
  for (std::int64_t panel = piece.first_panel; panel < piece.end_panel; panel += step) {
    const std::int64_t count = std::min(step, piece.end_panel - panel);
    const std::byte* data = p.weight->data() + panel * panel_bytes;
    std::fill_n(acc, count * panel_sums, 0.0F);
    if (direct) {
      LinearDirect<Weights>(p, count, data, panel_bytes, piece.first_row, num_rows, acc);
    } else {
      for (std::int64_t i = 0; i < count; i += kBlockedPanels) {
        LinearBlocked<Weights>(p, std::min(kBlockedPanels, count - i), data + i * panel_bytes,
                               panel_bytes, piece.first_row, num_rows, acc + i * panel_sums);
      }
    }
    if (p.weight->gated()) {
      StoreGatedPanels(p, piece.first_row, num_rows, panel, acc, panel_sums);
      continue;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      StorePanel(p, piece.first_row, num_rows, panel + i, acc + i * panel_sums);
    }
  }
}

void LinearTask(const LinearParams& p, const LinearPiece& piece) {
  switch (p.weight->format()) {
    case WeightFormat::kFloat32:
      return LinearPanels<Float32Weights>(p, piece);
    case WeightFormat::kBFloat16:
      return LinearPanels<BFloat16Weights>(p, piece);
    case WeightFormat::kFloat16:
      return LinearPanels<Float16Weights>(p, piece);
    case WeightFormat::kInt8:
      return LinearPanels<Int8Weights>(p, piece);
    case WeightFormat::kInt4:
      return LinearPanels<Int4Weights>(p, piece);
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(LinearTask);
HWY_EXPORT(StoreGatedPanels);
using HWY_NAMESPACE::kMaxRowBlock;

namespace {

constexpr std::int64_t kRowTile = 12;  // a multiple of every target's

// Rows of x that stay in L2 (256 KB of it) while a thread's panels pass over them.
std::int64_t MaxRowBlock(std::int64_t in_features) {
  constexpr std::int64_t kFloats = 64 * 1024;
  return std::clamp<std::int64_t>(kFloats / in_features / kRowTile * kRowTile, 2 * kRowTile,
                                  kMaxRowBlock);
}

// Enough tasks for threads that share cores with other ranks to even out. With one block of rows
// weights come from memory: tasks are short enough to follow their neighbours closely, or, while
// all wait for weights, long enough that a thread fetches ahead what it takes itself.
std::int64_t PanelsPerTask(const LinearParams& params, std::int64_t row_blocks, int num_threads) {
  // In units that stay together.
  const std::int64_t unit = params.weight->gated() ? 2 : 1;
  const std::int64_t units = NumPanels(*params.weight) / unit;
  const std::int64_t unit_bytes = params.weight->size_bytes() / units;
  const auto units_in = [&](std::int64_t bytes, std::int64_t groups) {
    const std::int64_t most = std::max<std::int64_t>(1, units / groups);
    return std::clamp<std::int64_t>(bytes / unit_bytes, 1, most);
  };
  if (params.num_rows <= kStreamedRows) {
    const std::int64_t tasks = CeilDiv(units, units_in(512 * 1024, 2 * num_threads));
    return unit * CeilDiv(units, CeilDiv(tasks, num_threads) * num_threads);
  }
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const std::int64_t per_task =
      unit * units_in(row_blocks == 1 ? 128 * 1024 : kAny, CeilDiv(8 * num_threads, row_blocks));
  return per_task > 1 ? per_task / 2 * 2 : 1;  // panels go in pairs
}

// How one product is cut into tasks.
struct LinearCut {
  std::int64_t panels;
  std::int64_t per_task = 1;
  std::int64_t row_blocks;
  std::int64_t rows = 0;  // of a block

  LinearCut(const LinearParams& params, std::int64_t max_rows, int num_threads)
      : panels(NumPanels(*params.weight)), row_blocks(CeilDiv(params.num_rows, max_rows)) {
    if (row_blocks == 0) return;
    per_task = PanelsPerTask(params, row_blocks, num_threads);
    rows = CeilDiv(CeilDiv(params.num_rows, row_blocks), kRowTile) * kRowTile;
  }

  std::int64_t NumTasks() const {
    return row_blocks == 0 ? 0 : CeilDiv(panels, per_task) * row_blocks;
  }

  LinearPiece Piece(const LinearParams& params, std::int64_t task) const {
    const std::int64_t row = task % row_blocks * rows;
    const std::int64_t panel = task / row_blocks * per_task;
    return {.first_row = row,
            .end_row = std::min<std::int64_t>(params.num_rows, row + rows),
            .first_panel = panel,
            .end_panel = std::min(panels, panel + per_task)};
  }
};

}  // namespace

void StoreGated(const LinearParams& params, std::int64_t row, std::int64_t num_rows,
                std::int64_t panel, const float* sums, std::int64_t sums_stride) {
  HWY_DYNAMIC_DISPATCH(StoreGatedPanels)(params, row, num_rows, panel, sums, sums_stride);
}

bool RoundsInputs(WeightFormat format) { return IsForDots(format) && HasDotProducts(); }

absl::Status Linear(const LinearParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->Linear(params);
  return GroupedLinear(absl::MakeConstSpan(&params, 1), stream);
}

absl::Status GroupedLinear(absl::Span<const LinearParams> products, Stream& stream) {
  if (products.empty()) return absl::OkStatus();
  ThreadPool& pool = PoolOf(stream);
  const PackedMatrix& weight = *products[0].weight;
  const bool dots = RoundsInputs(weight.format());
  const std::int64_t max_rows = dots ? kDotRows : MaxRowBlock(weight.in_features());
  // As many tasks a product as the one with the most rows has; the others return from some at once.
  std::int64_t tasks = 0;
  for (const LinearParams& params : products) {
    DCHECK(params.x_stride >= params.weight->in_features());
    DCHECK(params.y_stride >= params.weight->product_features());
    DCHECK(!params.weight->gated() || params.residual == nullptr);
    tasks = std::max(tasks, LinearCut(params, max_rows, pool.num_threads()).NumTasks());
  }
  if (tasks == 0) return absl::OkStatus();
  static std::atomic<std::uint64_t> launches = 0;
  const std::uint64_t launch = ++launches;
  const auto run = HWY_DYNAMIC_DISPATCH(LinearTask);
  const auto count = static_cast<std::int64_t>(products.size());
  pool.ParallelFor(count * tasks, [&](std::int64_t i, int /*thread*/) {
    const LinearParams& params = products[static_cast<std::size_t>(i / tasks)];
    const LinearCut cut(params, max_rows, pool.num_threads());
    if (i % tasks >= cut.NumTasks()) return;
    if (dots) {
      DotLinearTask(params, cut.Piece(params, i % tasks), launch);
    } else {
      run(params, cut.Piece(params, i % tasks));
    }
  });
  return absl::OkStatus();
}

absl::Status Embedding(const EmbeddingParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->Embedding(params);
  const PackedMatrix& weight = *params.weight;
  DCHECK(!weight.gated());
  const std::int32_t size = weight.in_features();
  const std::int64_t panel_bytes = PanelBytes(size, weight.format());
  ParallelRows(PoolOf(stream), params.num_rows, std::int64_t{8} * size,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   float* out = params.out + row * size;
                   const std::int64_t id = std::int64_t{params.ids[row]} - params.first_row;
                   if (id < 0 || id >= weight.out_features()) {
                     std::fill_n(out, size, 0.0F);
                     continue;
                   }
                   const std::byte* panel = weight.data() + id / kPanelWidth * panel_bytes;
                   const auto lane = static_cast<std::int32_t>(id % kPanelWidth);
                   for (std::int32_t in = 0; in < size; ++in) {
                     out[in] = PanelValue(panel, in, lane, weight.format());
                   }
                 }
               });
  return absl::OkStatus();
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
