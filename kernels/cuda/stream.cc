#include "kernels/cuda/stream.h"

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft::kernels::cuda {

absl::Status StatusOf(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      fmt::format("{}: {}: {}", what, cudaGetErrorName(error), cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaStream::Create() {
  cudaStream_t handle = nullptr;
  RETURN_IF_ERROR(
      StatusOf(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"));
  return std::unique_ptr<CudaStream>(new CudaStream(handle));
}

CudaStream::~CudaStream() { cudaStreamDestroy(handle_); }

absl::Status CudaStream::Synchronize() {
  return StatusOf(cudaStreamSynchronize(handle_), "cudaStreamSynchronize");
}

}  // namespace weft::kernels::cuda
