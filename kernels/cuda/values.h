#pragma once

#include <cstdint>

#include "kernels/cuda/platform.h"
#include "kernels/cuda/types.h"

#ifdef WEFT_CUDA_EMU
#include "kernels/cpu/convert.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// For kernels: reading, writing and rounding of stored values, and sums over threads.

namespace weft::kernels::cuda {

__device__ __forceinline__ float Widen(float value) { return value; }
__device__ __forceinline__ float Widen(BFloat16 value) {
  return __uint_as_float(std::uint32_t{value.bits} << 16);
}
__device__ __forceinline__ float Widen(Float16 value) {
#ifdef WEFT_CUDA_EMU
  return F16ToFloat(value.bits);
#else
  return __half2float(__ushort_as_half(value.bits));
#endif
}

// To nearest, ties to even; what is too large becomes infinite.
template <typename T>
__device__ __forceinline__ T Narrow(float value);
template <>
__device__ __forceinline__ float Narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ BFloat16 Narrow<BFloat16>(float value) {
#ifdef WEFT_CUDA_EMU
  return {FloatToBf16(value)};
#else
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#endif
}
template <>
__device__ __forceinline__ Float16 Narrow<Float16>(float value) {
#ifdef WEFT_CUDA_EMU
  return {FloatToF16(value)};
#else
  return {__half_as_ushort(__float2half_rn(value))};
#endif
}

// kCount values that are read or written at once; kCount * sizeof(T) is at most 16 bytes.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};
template <typename T>
inline constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

template <int kCount, typename T>
__device__ __forceinline__ Pack<T, kCount> LoadPack(const T* from) {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::CountGlobal(sizeof(T) * kCount, 0);
#endif
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}
template <int kCount, typename T>
__device__ __forceinline__ void StorePack(T* to, const Pack<T, kCount>& pack) {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::CountGlobal(0, sizeof(T) * kCount);
#endif
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// On the host: whether rows of `size` values, `stride` apart, can be taken 16 bytes at a time.
template <typename T>
bool PacksFit(const T* data, std::int64_t size, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && size % kPackOf<T> == 0 &&
         stride % kPackOf<T> == 0;
}

inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

// Each lane has the sum, in one order whoever asks.
__device__ __forceinline__ float WarpSum(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kAllLanes, value, lanes);
  return value;
}
__device__ __forceinline__ float WarpMax(float value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

// Each thread of the block has the sum. `scratch`: 32 floats of shared memory, which no thread may
// be reading any more; whole warps only.
__device__ __forceinline__ float BlockSum(float value, float* scratch) {
  value = WarpSum(value);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = value;
  __syncthreads();
  float sum = 0.0F;
  for (int i = 0; i < num_warps; ++i) sum += scratch[i];
  return sum;
}

// The sum over the block's threads before this one, and of all. `scratch`: a value a warp.
template <int kThreads>
__device__ __forceinline__ std::int32_t BlockPrefix(std::int32_t value, std::int32_t* scratch,
                                                    std::int32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::int32_t sum = value;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const std::int32_t other = __shfl_up_sync(kAllLanes, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  __syncthreads();  // scratch has been read
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  std::int32_t before = sum - value;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  return before;
}

}  // namespace weft::kernels::cuda
