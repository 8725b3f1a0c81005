#pragma once

#include <cstdint>

namespace weft::kernels {

// What kernels of devices take at most, where the CPU's take more: their launches refuse the rest,
// and a rank does so when it starts.
inline constexpr std::int32_t kMaxDeviceNormSize = 16384;  // of RmsNorm()
inline constexpr std::int32_t kMaxDeviceRopeDim = 512;     // of Rope()
inline constexpr std::int32_t kMaxDeviceExperts = 1024;    // of RouteRows()

}  // namespace weft::kernels
