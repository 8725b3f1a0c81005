#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/values.h"

// For kernels: the noise of kernels/gumbel_argmax.h, its bits, and the best of what it is added to.

namespace weft::kernels::cuda {

struct Words {
  unsigned w[4];
};

// Philox4x32-10 (kernels/cpu/philox.h).
__device__ __forceinline__ Words Philox(std::uint64_t seed, std::int64_t position, unsigned block) {
  unsigned c0 = static_cast<unsigned>(position);
  unsigned c1 = static_cast<unsigned>(static_cast<std::uint64_t>(position) >> 32);
  unsigned c2 = block;
  unsigned c3 = 0;
  unsigned key0 = static_cast<unsigned>(seed);
  unsigned key1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53U, c0);
    const unsigned low0 = 0xD2511F53U * c0;
    const unsigned high1 = __umulhi(0xCD9E8D57U, c2);
    const unsigned low1 = 0xCD9E8D57U * c2;
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

// As the CPU's LogOf(): multiplications and additions in one order, none of them fused, so that
// the bits are the same.
__device__ __forceinline__ float LogOf(float f, float e) {
  constexpr float kCoefficients[] = {-1.1514610310E-1F, 1.1676998740E-1F,  -1.2420140846E-1F,
                                     1.4249322787E-1F,  -1.6668057665E-1F, 2.0000714765E-1F,
                                     -2.4999993993E-1F, 3.3333331174E-1F};
  const float z = __fmul_rn(f, f);
  float y = 7.0376836292E-2F;
#pragma unroll
  for (int i = 0; i < 8; ++i) y = __fadd_rn(__fmul_rn(y, f), kCoefficients[i]);
  y = __fmul_rn(__fmul_rn(y, f), z);
  y = __fadd_rn(y, __fmul_rn(e, -2.12194440E-4F));
  y = __fsub_rn(y, __fmul_rn(0.5F, z));
  return __fadd_rn(__fadd_rn(f, y), __fmul_rn(e, 0.693359375F));
}

struct Split {
  float f;
  float e;
};
__device__ __forceinline__ Split SplitForLog(float x) {
  constexpr int kSqrtHalf = 0x3F3504F3;
  const int shifted = __float_as_int(x) - kSqrtHalf;
  const int mantissa = (shifted & 0x7FFFFF) + kSqrtHalf;
  return {__fsub_rn(__int_as_float(mantissa), 1.0F), __int2float_rn(shifted >> 23)};
}

// -log(-log((bits + 1/2) / 2^32)).
__device__ __forceinline__ float GumbelOfBits(unsigned bits) {
  const bool upper = bits >> 31 != 0;
  const int folded = static_cast<int>(upper ? ~bits : bits);
  const float w = __fmul_rn(__fadd_rn(__int2float_rn(folded), 0.5F), 0x1p-32F);
  Split split = SplitForLog(upper ? __fsub_rn(1.0F, w) : w);
  if (upper && w < 0.29F) split = {-w, 0.0F};
  split = SplitForLog(-LogOf(split.f, split.e));
  return -LogOf(split.f, split.e);
}

// GumbelNoise(); four tokens share the words of a Philox block.
__device__ __forceinline__ float GumbelOf(std::uint64_t seed, std::int64_t position,
                                          std::int32_t token_id) {
  const Words words = Philox(seed, position, static_cast<unsigned>(token_id / 4));
  unsigned bits = words.w[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) bits = token_id % 4 == j ? words.w[j] : bits;
  return GumbelOfBits(bits);
}

inline constexpr std::int32_t kNone = INT_MAX;

struct Candidate {
  float score;
  std::int32_t index;
};
// Highest score, then lowest index; anything rather than none.
__device__ __forceinline__ bool Better(const Candidate& a, const Candidate& b) {
  if (a.index == kNone) return false;
  return b.index == kNone || a.score > b.score || (a.score == b.score && a.index < b.index);
}

__device__ __forceinline__ Candidate BestOfWarp(Candidate best) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Candidate other = {__shfl_xor_sync(kAllLanes, best.score, lanes),
                             __shfl_xor_sync(kAllLanes, best.index, lanes)};
    if (Better(other, best)) best = other;
  }
  return best;
}

}  // namespace weft::kernels::cuda
