#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "kernels/cuda/emu/machine.h"

// The part of the CUDA runtime that Weft's host code uses, over the emulation (machine.h). Streams
// are lazy: nothing of what was launched has happened until somebody waits for it, so that a wait
// that is missing shows every time. Device memory is malloc'ed, filled with NaN.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
};
// After cudaErrorLaunchFailure: what the emulation saw, of this OS thread.
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);

namespace weft::cuda_emu {
class Stream;
class Graph;
struct Event;
// Appends work to `stream`; it runs when somebody waits for it. Work that returns cudaErrorNotReady
// waits for another rank: it is called again, and nothing behind it runs before.
void Enqueue(Stream* stream, std::function<cudaError_t()> work);
bool IsDeviceMemory(const void* data, std::size_t bytes);
// A kernel: `name` is what faults are told by.
cudaError_t LaunchGrid(const char* name, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                       const std::function<void()>& thread_main);

// Lets something go wrong in this process, as "kernel GumbelArgmax after 10": its eleventh launch
// from now on finds the context lost; or "collective 1 after 10": that of rank 1. "" lets nothing.
// Until the first call CUDA_EMU_FAULT says it.
void SetFault(std::string_view text);
// For what is about to run, `what` as in the text above: true if it is to fail.
bool TakeFault(std::string_view what);
// The device memory of this process, all devices together; CUDA_EMU_MEMORY_BYTES until then,
// else kDeviceBytes an allocation.
void SetDeviceMemory(std::size_t bytes);
}  // namespace weft::cuda_emu

using cudaStream_t = weft::cuda_emu::Stream*;
using cudaGraph_t = weft::cuda_emu::Graph*;
using cudaGraphExec_t = weft::cuda_emu::Graph*;
using cudaEvent_t = weft::cuda_emu::Event*;

inline constexpr unsigned cudaStreamNonBlocking = 1;
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
// Few, so that small cases spread over all of them.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
struct cudaDeviceProp {
  char name[256];
};
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaMalloc(void** data, std::size_t bytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaMallocHost(void** data, std::size_t bytes);
cudaError_t cudaFreeHost(void* data);
// `kind` is checked against where the memory is: host memory on the device's side is an error.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream);
// Of when the work before it has run.
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
