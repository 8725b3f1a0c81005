#pragma once

#include <cstdint>

// How probable a token is, as a share of the most probable one's probability, in whole numbers:
// their sums do not depend on any order, so that sampling filters (top_p) keep the same tokens on
// every device. For kernels, too.

#if defined(__CUDACC__) || defined(WEFT_CUDA_EMU)
#include "kernels/cuda/platform.h"
#define WEFT_HOST_DEVICE __host__ __device__
#else
#define WEFT_HOST_DEVICE
#endif

namespace weft::kernels {

// That of the most probable. Sums of up to 2^24 weights fit 64 bits.
inline constexpr int kTokenWeightBits = 39;
inline constexpr std::int32_t kMaxWeighedTokens = std::int32_t{1} << 24;

// Roundings of their own, never of both at once: who includes this is compiled without contraction.
WEFT_HOST_DEVICE inline double MulRounded(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
WEFT_HOST_DEVICE inline double AddRounded(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// exp((logit - highest) / temperature) * 2^kTokenWeightBits, to nearest. `logit` is at most
// `highest`, neither is NaN; temperature > 0.
WEFT_HOST_DEVICE inline std::uint64_t TokenWeight(float logit, float highest, float temperature) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << kTokenWeightBits;
  if (logit == highest) return kMost;  // equal infinities have no difference
  const double x = (static_cast<double>(logit) - highest) / temperature;
  constexpr double kLog2E = 1.4426950408889634;
  const double exponent = MulRounded(x, kLog2E);
  if (!(exponent > -kTokenWeightBits - 1)) return 0;
  // exp(x) = 2^n exp(r), |r| <= log(2) / 2.
  const int n = static_cast<int>(AddRounded(exponent, -0.5));
  constexpr double kLn2High = 0x1.62e42feep-1;  // n times it is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  const double r = AddRounded(AddRounded(x, MulRounded(-n, kLn2High)), MulRounded(-n, kLn2Low));
  // The series up to r^12 / 12!, its even and its odd powers by Horner's rule.
  constexpr double kEven[] = {1.0 / 479001600, 1.0 / 3628800, 1.0 / 40320, 1.0 / 720,
                              1.0 / 24,        1.0 / 2,       1.0};
  constexpr double kOdd[] = {1.0 / 39916800, 1.0 / 362880, 1.0 / 5040, 1.0 / 120, 1.0 / 6, 1.0};
  const double square = MulRounded(r, r);
  double even = 0.0;
  double odd = 0.0;
  for (const double c : kEven) even = AddRounded(MulRounded(even, square), c);
  for (const double c : kOdd) odd = AddRounded(MulRounded(odd, square), c);
  const double power = AddRounded(even, MulRounded(odd, r));
  // Multiplying by a power of two is exact.
  const double scale = static_cast<double>(std::int64_t{1} << (kTokenWeightBits + 1 + n)) * 0.5;
  return static_cast<std::uint64_t>(
      static_cast<std::int64_t>(AddRounded(MulRounded(power, scale), 0.5)));
}

}  // namespace weft::kernels
