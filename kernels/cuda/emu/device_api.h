#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/emu/machine.h"

// The names that nvcc gives a kernel, over the emulation. Global, as there.

using std::isinf;
using std::isnan;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::weft::cuda_emu::current_thread->thread_idx)
#define blockIdx (::weft::cuda_emu::current_thread->block_idx)
#define blockDim (::weft::cuda_emu::current_thread->block_dim)
#define gridDim (::weft::cuda_emu::current_thread->grid_dim)

inline void __syncthreads(weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  weft::cuda_emu::BlockBarrier(where);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFF,
                       weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  weft::cuda_emu::WarpMeet(mask, "__syncwarp", where, weft::cuda_emu::Memory::kOrdered, nullptr, 0);
}

namespace weft::cuda_emu {

template <typename T>
T Shuffle(unsigned mask, T value, int source, const char* operation, Where where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "as in CUDA");
  const LaneData* lanes = WarpMeet(mask, operation, where, Memory::kUnordered, &value, sizeof(T));
  CheckLane(mask, source, operation, where);
  TakeLane(lanes, source, &value, sizeof(T));
  return value;
}

}  // namespace weft::cuda_emu

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane,
              weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  return weft::cuda_emu::Shuffle(mask, value, lane & 31, "__shfl_sync", where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  return weft::cuda_emu::Shuffle(mask, value, weft::cuda_emu::current_thread->lane ^ lane_mask,
                                 "__shfl_xor_sync", where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta,
                 weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  const int lane = weft::cuda_emu::current_thread->lane;
  return weft::cuda_emu::Shuffle(mask, value, lane < delta ? lane : lane - delta, "__shfl_up_sync",
                                 where);
}
inline unsigned __ballot_sync(unsigned mask, bool vote,
                              weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  return weft::cuda_emu::Ballot(mask, vote, "__ballot_sync", where);
}
inline bool __any_sync(unsigned mask, bool vote,
                       weft::cuda_emu::Where where = weft::cuda_emu::Where::current()) {
  return weft::cuda_emu::Ballot(mask, vote, "__any_sync", where) != 0;
}

// One order of rounding each, never contracted (this file's users are built without contraction).
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __ffs(int value) {
  return value == 0 ? 0 : std::countr_zero(static_cast<unsigned>(value)) + 1;
}
inline float rsqrtf(float value) { return 1.0F / std::sqrt(value); }

inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
