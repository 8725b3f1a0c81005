#include "kernels/cuda/memory.h"

#include <string>

#include "fmt/format.h"
#include "kernels/cuda/platform.h"

namespace weft::kernels::cuda {

absl::StatusOr<void*> AllocateOnDevice(std::int64_t bytes, std::string_view what) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes));
  if (error == cudaSuccess) return data;
  std::string message = fmt::format("{} bytes of {}: {}", bytes, what, cudaGetErrorName(error));
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    message += fmt::format("; {} of {} bytes are free", free, total);
  }
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

}  // namespace weft::kernels::cuda
