#include "kernels/elementwise.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/launch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, which it would disable.
#include "kernels/cpu/silu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;

// Calls body(tag, i) for [0, size): whole vectors, then single lanes.
template <typename Body>
HWY_INLINE void ForLanes(std::int64_t size, const Body& body) {
  const Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= size; i += lanes) body(d, i);
  for (; i < size; ++i) body(hn::CappedTag<float, 1>(), i);
}

// Heads [begin, end) of all rows'.
void RmsNormHeads(const RmsNormParams& p, std::int64_t begin, std::int64_t end) {
  const Tag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t row_stride =
      p.row_stride != 0 ? p.row_stride : std::int64_t{p.num_heads} * p.size;
  for (std::int64_t head = begin; head < end; ++head) {
    const std::int64_t at = head / p.num_heads * row_stride + head % p.num_heads * p.size;
    const float* x = p.x + at;
    float* out = p.out + at;
    auto squares = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + lanes <= p.size; i += lanes) {
      const auto value = hn::LoadU(d, x + i);
      squares = hn::MulAdd(value, value, squares);
    }
    float sum = hn::GetLane(hn::SumOfLanes(d, squares));
    for (; i < p.size; ++i) sum += x[i] * x[i];
    const float scale = 1.0F / std::sqrt(sum / static_cast<float>(p.size) + p.eps);
    ForLanes(p.size, [&](auto tag, std::int64_t j) HWY_ATTR {
      const auto value = hn::Mul(hn::LoadU(tag, x + j), hn::Set(tag, scale));
      hn::StoreU(hn::Mul(value, hn::LoadU(tag, p.weight + j)), tag, out + j);
    });
  }
}

void RopeRows(const RopeParams& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t half = p.head_dim / 2;
  const std::int64_t head_stride = p.head_stride != 0 ? p.head_stride : p.head_dim;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* cos = p.cos + row * half;
    const float* sin = p.sin + row * half;
    for (std::int64_t head = 0; head < p.num_heads; ++head) {
      const float* a = p.x + row * p.row_stride + head * head_stride;
      const float* b = a + half;
      float* out = p.out == nullptr ? p.x + row * p.row_stride + head * head_stride
                                    : p.out + row * p.out_row_stride + head * p.out_head_stride;
      ForLanes(half, [&](auto tag, std::int64_t i) HWY_ATTR {
        const auto va = hn::LoadU(tag, a + i);
        const auto vb = hn::LoadU(tag, b + i);
        const auto c = hn::LoadU(tag, cos + i);
        const auto s = hn::LoadU(tag, sin + i);
        hn::StoreU(hn::NegMulAdd(vb, s, hn::Mul(va, c)), tag, out + i);
        hn::StoreU(hn::MulAdd(va, s, hn::Mul(vb, c)), tag, out + half + i);
      });
    }
  }
}

void SiluMulRows(const SiluMulParams& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* gate = p.gate_up + row * 2 * p.size;
    const float* up = gate + p.size;
    float* out = p.out + row * p.size;
    ForLanes(p.size, [&](auto tag, std::int64_t i) HWY_ATTR {
      const auto x = hn::LoadU(tag, gate + i);
      hn::StoreU(hn::Mul(Silu(tag, x), hn::LoadU(tag, up + i)), tag, out + i);
    });
  }
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(RmsNormHeads);
HWY_EXPORT(RopeRows);
HWY_EXPORT(SiluMulRows);

absl::Status RmsNorm(const RmsNormParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->RmsNorm(params);
  const auto rows = HWY_DYNAMIC_DISPATCH(RmsNormHeads);
  ParallelRows(PoolOf(stream), std::int64_t{params.num_rows} * params.num_heads, params.size,
               [&](std::int64_t begin, std::int64_t end) { rows(params, begin, end); });
  return absl::OkStatus();
}

absl::Status Rope(const RopeParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->Rope(params);
  DCHECK(params.head_dim % 2 == 0);
  const auto rows = HWY_DYNAMIC_DISPATCH(RopeRows);
  ParallelRows(PoolOf(stream), params.num_rows, std::int64_t{params.num_heads} * params.head_dim,
               [&](std::int64_t begin, std::int64_t end) { rows(params, begin, end); });
  return absl::OkStatus();
}

absl::Status SiluMul(const SiluMulParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->SiluMul(params);
  const auto rows = HWY_DYNAMIC_DISPATCH(SiluMulRows);
  ParallelRows(PoolOf(stream), params.num_rows, std::int64_t{4} * params.size,
               [&](std::int64_t begin, std::int64_t end) { rows(params, begin, end); });
  return absl::OkStatus();
}

absl::Status GatherRows(const GatherRowsParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->GatherRows(params);
  ParallelRows(PoolOf(stream), params.num_rows, params.size,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   std::memcpy(params.out + row * params.size,
                               params.in + std::int64_t{params.index[row]} * params.size,
                               static_cast<std::size_t>(params.size) * sizeof(float));
                 }
               });
  return absl::OkStatus();
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
