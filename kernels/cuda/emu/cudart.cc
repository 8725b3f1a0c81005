#include "kernels/cuda/emu/cudart.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
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
  std::size_t next = 0;  // of them; those before have run
  Graph* capturing = nullptr;
  cudaError_t error = cudaSuccess;  // sticky, as a lost context is
};

struct Event {
  std::chrono::steady_clock::time_point reached;
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
  std::size_t used ABSL_GUARDED_BY(mutex) = 0;
  std::size_t limit ABSL_GUARDED_BY(mutex) = 0;  // of all of them together; 0: none

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
  static Allocations& memory = *[] {
    auto* const made = new Allocations;
    if (const char* const text = std::getenv("CUDA_EMU_MEMORY_BYTES")) {
      MutexLock lock(made->mutex);
      made->limit = std::strtoull(text, nullptr, 10);
    }
    return made;
  }();
  return memory;
}

struct Fault {
  Mutex mutex;
  std::string what ABSL_GUARDED_BY(mutex);
  long left ABSL_GUARDED_BY(mutex) = 0;

  void Set(std::string_view text) {
    constexpr std::string_view kAfter = " after ";
    const std::size_t at = text.rfind(kAfter);
    MutexLock lock(mutex);
    what = text.substr(0, at);
    left = at == text.npos
               ? 0
               : std::strtol(std::string(text.substr(at + kAfter.size())).c_str(), nullptr, 10);
  }
};
Fault& TheFault() {
  static Fault& fault = *[] {
    auto* const made = new Fault;
    const char* const text = std::getenv("CUDA_EMU_FAULT");
    made->Set(text != nullptr ? text : "");
    return made;
  }();
  return fault;
}

// As far as it goes.
cudaError_t RunPending(Stream& stream) {
  while (stream.next < stream.pending.size()) {
    if (stream.error == cudaSuccess) {
      const cudaError_t error = stream.pending[stream.next]();
      if (error == cudaErrorNotReady) return error;
      stream.error = error;
    }
    ++stream.next;
  }
  stream.pending.clear();
  stream.next = 0;
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

void SetFault(std::string_view text) { TheFault().Set(text); }

bool TakeFault(std::string_view what) {
  Fault& fault = TheFault();
  MutexLock lock(fault.mutex);
  return !fault.what.empty() && fault.what == what && --fault.left < 0;
}

void SetDeviceMemory(std::size_t bytes) {
  Allocations& memory = DeviceMemory();
  MutexLock lock(memory.mutex);
  memory.limit = bytes;
}

cudaError_t LaunchGrid(const char* name, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                       const std::function<void()>& thread_main) {
  std::string fault = TakeFault(std::string("kernel ") + name)
                          ? "an illegal memory access, for a test"
                          : RunGrid(grid, block, dynamic_shared_bytes, thread_main);
  if (fault.empty()) return cudaSuccess;
  return Explain(cudaErrorLaunchFailure, fmt::format("{}: {}", name, fault));
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
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
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
  Allocations& memory = DeviceMemory();
  weft::MutexLock lock(memory.mutex);
  *total = memory.limit > 0 ? memory.limit : kDeviceBytes;
  *free = *total - (memory.limit > 0 ? std::min(memory.used, memory.limit) : 0);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "a wait while a graph is captured");
  cudaError_t error = cudaSuccess;
  while ((error = RunPending(*stream)) == cudaErrorNotReady) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return error;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "a query while a graph is captured");
  return RunPending(*stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (captures > 0)
    return Explain(cudaErrorStreamCaptureUnsupported, "cudaMalloc while a graph is captured");
  Allocations& memory = DeviceMemory();
  weft::MutexLock lock(memory.mutex);
  const bool fits = memory.limit > 0 ? memory.used + bytes <= memory.limit : bytes <= kDeviceBytes;
  if (!fits || posix_memalign(data, 256, bytes) != 0) {
    return Explain(cudaErrorMemoryAllocation, "out of memory");
  }
  std::memset(*data, 0xFF, bytes);
  memory.sizes[static_cast<std::byte*>(*data)] = bytes;
  memory.used += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  Allocations& memory = DeviceMemory();
  weft::MutexLock lock(memory.mutex);
  const auto at = memory.sizes.find(static_cast<std::byte*>(data));
  if (at == memory.sizes.end()) {
    return Explain(cudaErrorInvalidValue, "cudaFree of what cudaMalloc did not give");
  }
  memory.used -= at->second;
  memory.sizes.erase(at);
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

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Enqueue(stream, [event] {
    event->reached = std::chrono::steady_clock::now();
    return cudaSuccess;
  });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->reached - start->reached).count();
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
