#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

namespace weft {

// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) ...: the same bits whoever computes it.
// `out` may be one of the parts. 1 part copies.
inline void RankOrderSum(absl::Span<const float* const> parts, std::int64_t count, float* out) {
  // Explicit vectors, since -O2 leaves such loops scalar; the running sums stay in L1.
  using Vector [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = float;
  constexpr std::int64_t kLanes = 8;
  constexpr std::int64_t kBlock = 1024;
  alignas(64) float sums[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
    std::memcpy(sums, parts[0] + begin, bytes);
    for (const float* const part : parts.subspan(1)) {
      const float* const from = part + begin;
      std::int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        *reinterpret_cast<Vector*>(sums + i) += *reinterpret_cast<const Vector*>(from + i);
      }
      for (; i < n; ++i) sums[i] += from[i];
    }
    std::memcpy(out + begin, sums, bytes);
  }
}

}  // namespace weft
