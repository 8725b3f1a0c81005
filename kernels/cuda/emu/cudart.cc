#include "kernels/cuda/emu/cudart.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/mutex.h"

namespace weft::cuda_emu {

using Work = std::function<cudaError_t()>;

class Graph {
 public:
  std::vector<Work> nodes;
};

class Stream {
 public:
  std::vector<Work> pending;
  Graph* capturing = nullptr;
  cudaError_t error = cudaSuccess;  // sticky, as a lost context is
};

namespace {

constexpr int kNumSms = 4;
constexpr int kNumDevices = 64;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 30;

thread_local std::string last_message;
thread_local int captures = 0;  // of this thread, which forbid allocation and waiting

cudaError_t Explain(cudaError_t error, std::string message) {
  last_message = std::move(message);
  return error;
}

// Device allocations: begin -> bytes.
struct Allocations {
  Mutex mutex;
  std::map<const std::byte*, std::size_t> sizes ABSL_GUARDED_BY(mutex);

  bool Holds(const void* data, std::size_t bytes) {
    MutexLock lock(mutex);
    const auto* at = static_cast<const std::byte*>(data);
    auto it = sizes.upper_bound(at);
    if (it == sizes.begin()) return false;
    --it;
    return at + bytes <= it->first + it->second;
  }
};
Allocations& DeviceMemory() {
  static auto* memory = new Allocations;
  return *memory;
}

cudaError_t RunPending(Stream& stream) {
  std::vector<Work> work = std::exchange(stream.pending, {});
  for (const Work& item : work) {
    if (stream.error == cudaSuccess) stream.error = item();
  }
  return stream.error;
}

}  // namespace

bool IsDeviceMemory(const void* data, std::size_t bytes) {
  return DeviceMemory().Holds(data, bytes);
}

void Enqueue(Stream* stream, Work work) {
  auto& queue = stream->capturing != nullptr ? stream->capturing->nodes : stream->pending;
  queue.push_back(std::move(work));
}

cudaError_t LaunchGrid(dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                       const std::function<void()>& thread_main) {
  std::string fault = RunGrid(grid, block, dynamic_shared_bytes, thread_main);
  return fault.empty() ? cudaSuccess : Explain(cudaErrorLaunchFailure, std::move(fault));
}

}  // namespace weft::cuda_emu

using namespace weft::cuda_emu;  // what follows is C in the original

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
  }
  return "unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
  return last_message.empty() ? cudaGetErrorName(error) : last_message.c_str();
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kNumDevices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kNumDevices) return Explain(cudaErrorInvalidValue, "no such device");
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  if (attribute != cudaDevAttrMultiProcessorCount)
    return Explain(cudaErrorInvalidValue, "no such attribute");
  *value = kNumSms;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kDeviceBytes;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "a wait while a graph is captured");
  return RunPending(*stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "cudaMalloc while a graph is captured");
  if (bytes > kDeviceBytes || posix_memalign(data, 256, bytes) != 0) {
    return Explain(cudaErrorMemoryAllocation, fmt::format("cannot allocate {} bytes", bytes));
  }
  std::memset(*data, 0xFF, bytes);
  Allocations& memory = DeviceMemory();
  weft::MutexLock lock(memory.mutex);
  memory.sizes[static_cast<std::byte*>(*data)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  Allocations& memory = DeviceMemory();
  weft::MutexLock lock(memory.mutex);
  if (memory.sizes.erase(static_cast<std::byte*>(data)) == 0) {
    return Explain(cudaErrorInvalidValue, "cudaFree of what cudaMalloc did not give");
  }
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "cudaMallocHost while a graph is captured");
  *data = std::malloc(bytes);
  return *data != nullptr
             ? cudaSuccess
             : Explain(cudaErrorMemoryAllocation, fmt::format("cannot allocate {} bytes", bytes));
}

cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Allocations& memory = DeviceMemory();
  if (memory.Holds(to, bytes) != (kind != cudaMemcpyDeviceToHost) ||
      memory.Holds(from, bytes) != (kind != cudaMemcpyHostToDevice)) {
    return Explain(
        cudaErrorInvalidValue,
        fmt::format("cudaMemcpyAsync of {} bytes: the memory is not of its kind", bytes));
  }
  Enqueue(stream, [=] {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!DeviceMemory().Holds(data, bytes)) {
    return Explain(cudaErrorInvalidValue,
                   fmt::format("cudaMemsetAsync of {} bytes: no device memory", bytes));
  }
  Enqueue(stream, [=] {
    std::memset(data, value, bytes);
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  if (stream->capturing != nullptr)
    return Explain(cudaErrorInvalidValue, "the stream is being captured");
  stream->capturing = new Graph;
  ++captures;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (stream->capturing == nullptr)
    return Explain(cudaErrorInvalidValue, "the stream is not being captured");
  *graph = std::exchange(stream->capturing, nullptr);
  --captures;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *exec = new Graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Work& node : exec->nodes) Enqueue(stream, node);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
