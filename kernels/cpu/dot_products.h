#pragma once

#ifdef __x86_64__
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

// What the kernels of a CPU that HasDotProducts() share.

// Of each function, not of the file: what the linker may share with others is for any CPU.
#define AVX512_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")))

namespace weft::kernels {

inline __mmask16 FirstLanes(std::int64_t count) {
  return static_cast<__mmask16>((1U << static_cast<unsigned>(count)) - 1U);
}

// Calls body(std::integral_constant<int, n>) for a run-time n in [1, kMost].
template <int kMost, typename Body>
AVX512_DOT inline void WithRows(std::int64_t rows, const Body& body) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return WithRows<kMost - 1>(rows, body);
  }
  body(std::integral_constant<int, kMost>());
}

}  // namespace weft::kernels
#endif
