#pragma once

// What a kernel's source needs of its platform, so that the same source builds with nvcc and,
// with -DWEFT_CUDA_EMU, with a C++ compiler for the emulation (kernels/cuda/emu). Rules for such
// sources: launch by Launch(), shared memory by the macros, `_sync` operations of the warp only, no
// PTX outside of kernels/cuda/tensor_core.h, arguments by value.

#include <cstddef>
#include <cstdint>

#ifdef WEFT_CUDA_EMU
#include "kernels/cuda/emu/cudart.h"
#include "kernels/cuda/emu/device_api.h"
#else
#include <cuda_runtime.h>
#endif

#include "absl/status/status.h"

namespace weft::kernels::cuda {

// What to put in front of a kernel's results: the error's name and text.
absl::Status StatusOf(cudaError_t error, const char* what);

// Of the current device; 1 where there is none.
inline int NumSms() {
  int device = 0;
  int count = 1;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return count;
}

// Remembers what this thread has launched last: a lost context shows with a later wait, which then
// names it.
void NoteLaunch(const char* name);

#ifdef WEFT_CUDA_EMU
#define WEFT_SHARED(type, name, count) \
  type* name = static_cast<type*>(     \
      ::weft::cuda_emu::StaticShared(sizeof(type) * (count), ::weft::cuda_emu::Where::current()))
#define WEFT_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::weft::cuda_emu::DynamicShared())
#else
#define WEFT_SHARED(type, name, count) __shared__ type name[count]
#define WEFT_DYNAMIC_SHARED(type, name)                          \
  extern __shared__ __align__(128) unsigned char weft_shared_[]; \
  type* name = reinterpret_cast<type*>(weft_shared_)
#endif

// Enqueues kKernel(args) on `stream`. `args` is a trivially copyable struct.
template <auto kKernel, typename Args>
absl::Status Launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
                    cudaStream_t stream, const Args& args) {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::Enqueue(stream, [=] {
    return weft::cuda_emu::LaunchGrid(name, grid, block, shared_bytes, [&args] { kKernel(args); });
  });
  NoteLaunch(name);
  return absl::OkStatus();
#else
  const auto* kernel = reinterpret_cast<const void*>(kKernel);
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return StatusOf(error, name);
  }
  void* arguments[] = {const_cast<Args*>(&args)};
  NoteLaunch(name);
  return StatusOf(cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream), name);
#endif
}

}  // namespace weft::kernels::cuda
