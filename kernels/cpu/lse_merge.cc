#include "kernels/lse_merge.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/launch.h"

// Bound by memory and small: plain loops that the compiler vectorizes.

namespace weft::kernels {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// The largest LSE of the parts and the sum of exp(lse - max); `stride` floats from part to part.
struct Total {
  float max;
  float sum;

  float Weight(float lse) const { return max == kEmpty ? 0.0F : std::exp(lse - max) / sum; }
  float Lse() const { return max == kEmpty ? kEmpty : max + std::log(sum); }
};

Total TotalOf(const float* lse, std::int64_t stride, std::int32_t num_parts) {
  Total total{kEmpty, 0.0F};
  for (std::int32_t part = 0; part < num_parts; ++part) {
    DCHECK(lse[part * stride] != std::numeric_limits<float>::infinity());
    total.max = std::max(total.max, lse[part * stride]);
  }
  if (total.max == kEmpty) {
    // The largest beside nothing is lost if it is a NaN, which must not look like nothing.
    for (std::int32_t part = 0; part < num_parts; ++part) {
      if (std::isnan(lse[part * stride])) total.max = lse[part * stride];
    }
    return total;
  }
  for (std::int32_t part = 0; part < num_parts; ++part) {
    total.sum += std::exp(lse[part * stride] - total.max);
  }
  return total;
}

}  // namespace

absl::Status LseScale(const LseScaleParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->LseScale(params);
  const std::int64_t heads = std::int64_t{params.num_rows} * params.num_heads;
  ParallelRows(PoolOf(stream), heads, params.head_dim + 32,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t head = begin; head < end; ++head) {
                   const Total total = TotalOf(params.lse + head, heads, params.num_parts);
                   const float weight = total.Weight(params.lse[params.part * heads + head]);
                   float* out = params.out + head * params.head_dim;
                   if (weight == 0.0F) {
                     std::fill_n(out, params.head_dim, 0.0F);
                   } else {
                     for (std::int32_t i = 0; i < params.head_dim; ++i) out[i] *= weight;
                   }
                 }
               });
  return absl::OkStatus();
}

absl::Status LseMerge(const LseMergeParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->LseMerge(params);
  const std::int64_t heads = std::int64_t{params.num_rows} * params.num_heads;
  const std::int64_t cost = std::int64_t{params.num_parts} * (params.head_dim + 32);
  ParallelRows(PoolOf(stream), heads, cost, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) {
      const float* lse = params.lse + head;
      const Total total = TotalOf(lse, params.lse_stride, params.num_parts);
      float* out = params.out + head * params.head_dim;
      std::fill_n(out, params.head_dim, 0.0F);
      for (std::int32_t part = 0; part < params.num_parts; ++part) {
        const float weight = total.Weight(lse[part * params.lse_stride]);
        if (weight == 0.0F) continue;
        const float* in = params.parts + part * params.part_stride + head * params.head_dim;
        for (std::int32_t i = 0; i < params.head_dim; ++i) out[i] += weight * in[i];
      }
      if (params.merged_lse != nullptr) params.merged_lse[head] = total.Lse();
    }
  });
  return absl::OkStatus();
}

}  // namespace weft::kernels
