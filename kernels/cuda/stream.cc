#include "kernels/cuda/stream.h"

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft::kernels::cuda {
namespace {

thread_local const char* last_launch = "nothing";

// What a wait met.
absl::Status StatusOfWait(cudaError_t error, const char* what) {
  const absl::Status status = StatusOf(error, what);
  if (status.ok()) return status;
  return absl::Status(status.code(), fmt::format("{}; launched last: {}",
                                                 std::string(status.message()), last_launch));
}

}  // namespace

void NoteLaunch(const char* name) { last_launch = name; }

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
  return StatusOfWait(cudaStreamSynchronize(handle_), "cudaStreamSynchronize");
}

absl::StatusOr<bool> CudaStream::Query() {
  const cudaError_t error = cudaStreamQuery(handle_);
  if (error == cudaErrorNotReady) return false;
  RETURN_IF_ERROR(StatusOfWait(error, "cudaStreamQuery"));
  return true;
}

}  // namespace weft::kernels::cuda
