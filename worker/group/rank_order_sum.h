#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace weft {

// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) ...: the same bits whoever computes it.
// `out` may be one of the parts.
inline void RankOrderSum(absl::Span<const float* const> parts, std::int64_t count, float* out) {
  // Explicit vectors, since -O2 leaves such loops scalar.
  using Vector [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = float;
  constexpr std::int64_t kLanes = 8;
  constexpr int kUnroll = 4;
  std::int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    Vector sums[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      sums[u] = *reinterpret_cast<const Vector*>(parts[0] + i + u * kLanes);
    }
    for (const float* const part : parts.subspan(1)) {
      for (int u = 0; u < kUnroll; ++u) {
        sums[u] += *reinterpret_cast<const Vector*>(part + i + u * kLanes);
      }
    }
    for (int u = 0; u < kUnroll; ++u) {
      *reinterpret_cast<Vector*>(out + i + u * kLanes) = sums[u];
    }
  }
  for (; i < count; ++i) {
    float sum = parts[0][i];
    for (const float* const part : parts.subspan(1)) sum += part[i];
    out[i] = sum;
  }
}

}  // namespace weft
