#include "kernels/linear.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/launch.h"
#include "kernels/cpu/panel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

// Inputs a converted piece of a panel holds: 16 KB of floats, half of L1.
constexpr std::int64_t kDepthBlock = 256;
// Rows whose sums wait on the stack between pieces.
constexpr std::int64_t kMaxRowBlock = 192;

// Rows that stay in L2 while a thread's panels pass over them.
std::int64_t RowBlock(std::int64_t num_rows, std::int64_t in_features) {
  constexpr std::int64_t kFloats = 64 * 1024;
  const std::int64_t most =
      std::clamp<std::int64_t>(kFloats / in_features / 12 * 12, 24, kMaxRowBlock);
  return CeilDiv(num_rows, CeilDiv(num_rows, most));
}

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

// Widens `depth` inputs of a panel to [depth][16] floats, hinting what comes next in memory.
template <typename Weights>
void WidenPanel(const std::byte* HWY_RESTRICT panel, std::int64_t depth, float* HWY_RESTRICT out) {
  constexpr int kStepBytes = Weights::kDepth * kPanelWidth * Weights::kElementBytes;
  constexpr std::int64_t kAheadBytes = 8192;
  const PanelTag d;
  PanelVec w[Weights::kDepth][kVecs];
  for (std::int64_t k = 0; k < depth; k += Weights::kDepth, panel += kStepBytes) {
    __builtin_prefetch(panel + kAheadBytes, 0, 2);
    Weights::Load(panel, w);
    for (int i = 0; i < Weights::kDepth; ++i) {
      for (int v = 0; v < kVecs; ++v, out += kLanes) hn::StoreU(w[i][v], d, out);
    }
  }
}

// Few rows: weights are used as they come from memory.
template <typename Weights>
void LinearDirect(const LinearParams& p, std::int64_t panel, const std::byte* data) {
  HWY_ALIGN float acc[kTileRows * kPanelWidth] = {};
  PanelProduct<Weights>(p.x, p.x_stride, p.num_rows, data, p.weight->in_features(), acc,
                        kPanelWidth);
  StorePanel(p, 0, p.num_rows, panel, acc);
}

// Many rows: a piece of the panel at a time is widened into L1 and serves a block of rows.
template <typename Weights>
void LinearBlocked(const LinearParams& p, std::int64_t panel, const std::byte* data,
                   std::int64_t row, std::int64_t num_rows) {
  HWY_ALIGN float wide[(kDepthBlock + 1) * kPanelWidth];
  HWY_ALIGN float acc[kMaxRowBlock * kPanelWidth];
  std::fill_n(acc, num_rows * kPanelWidth, 0.0F);
  const std::int64_t in_features = p.weight->in_features();
  for (std::int64_t k = 0; k < in_features; k += kDepthBlock) {
    const std::int64_t depth = std::min(kDepthBlock, in_features - k);
    const std::byte* piece = data + k * kPanelWidth * Weights::kElementBytes;
    if constexpr (!std::is_same_v<Weights, Float32Weights>) {
      WidenPanel<Weights>(piece, depth, wide);
      piece = reinterpret_cast<const std::byte*>(wide);
    }
    PanelProduct<Float32Weights>(p.x + row * p.x_stride + k, p.x_stride, num_rows, piece, depth,
                                 acc, kPanelWidth);
  }
  StorePanel(p, row, num_rows, panel, acc);
}

template <typename Weights>
void LinearPanels(const LinearParams& p, std::int64_t first, std::int64_t end) {
  const std::int64_t in_features = p.weight->in_features();
  const std::int64_t panel_bytes =
      PanelElements(p.weight->in_features(), p.weight->dtype()) * Weights::kElementBytes;
  if (p.num_rows <= kTileRows) {
    for (std::int64_t panel = first; panel < end; ++panel) {
      LinearDirect<Weights>(p, panel, p.weight->data() + panel * panel_bytes);
    }
    return;
  }
  const std::int64_t row_block = RowBlock(p.num_rows, in_features);
  for (std::int64_t row = 0; row < p.num_rows; row += row_block) {
    const std::int64_t num_rows = std::min(row_block, p.num_rows - row);
    for (std::int64_t panel = first; panel < end; ++panel) {
      LinearBlocked<Weights>(p, panel, p.weight->data() + panel * panel_bytes, row, num_rows);
    }
  }
}

// Computes outputs of panels [first, end) for all rows.
void LinearTask(const LinearParams& p, std::int64_t first, std::int64_t end) {
  switch (p.weight->dtype()) {
    case DType::kFloat32:
      return LinearPanels<Float32Weights>(p, first, end);
    case DType::kBFloat16:
      return LinearPanels<BFloat16Weights>(p, first, end);
    case DType::kFloat16:
      return LinearPanels<Float16Weights>(p, first, end);
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(LinearTask);

absl::Status Linear(const LinearParams& params, Stream& stream) {
  if (params.num_rows == 0) return absl::OkStatus();
  const PackedMatrix& weight = *params.weight;
  DCHECK(params.x_stride >= weight.in_features());
  DCHECK(params.y_stride >= weight.out_features());
  ThreadPool& pool = PoolOf(stream);
  const std::int64_t panels = CeilDiv(weight.out_features(), kPanelWidth);
  // Enough pieces for threads that share cores with other ranks to even out, each long enough to
  // stream from memory.
  const std::int64_t panel_bytes =
      PanelElements(weight.in_features(), weight.dtype()) * DTypeBytes(weight.dtype());
  constexpr std::int64_t kTaskBytes = 64 * 1024;
  const std::int64_t per_task = std::clamp<std::int64_t>(
      panels / (4 * pool.num_threads()), 1, std::max<std::int64_t>(1, kTaskBytes / panel_bytes));
  const auto task = HWY_DYNAMIC_DISPATCH(LinearTask);
  pool.ParallelFor(CeilDiv(panels, per_task), [&](std::int64_t index, int /*thread*/) {
    task(params, index * per_task, std::min(panels, (index + 1) * per_task));
  });
  return absl::OkStatus();
}

absl::Status Embedding(const EmbeddingParams& params, Stream& stream) {
  const PackedMatrix& weight = *params.weight;
  const DType dtype = weight.dtype();
  const std::int32_t size = weight.in_features();
  const std::int64_t panel_bytes = PanelElements(size, dtype) * DTypeBytes(dtype);
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
                     out[in] = LoadElement(panel, PanelIndex(in, lane, dtype), dtype);
                   }
                 }
               });
  return absl::OkStatus();
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
