#pragma once

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace weft {

// For sums with now(): "inf", and whatever is too long for <chrono>'s clocks, is a year.
inline std::chrono::nanoseconds ToBoundedChrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(std::min(duration, absl::Hours(24 * 365)));
}

}  // namespace weft
