#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/platform.h"
#include "kernels/device/stream.h"

namespace weft::kernels::cuda {

// A stream of the process's current device. Launches are asynchronous; Synchronize() has the error
// of any of them.
class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<CudaStream>> Create();
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  DeviceKind device() const override { return DeviceKind::kCuda; }
  absl::Status Synchronize() override;
  // Whether everything launched so far has run.
  absl::StatusOr<bool> Query();
  cudaStream_t handle() const { return handle_; }

 private:
  explicit CudaStream(cudaStream_t handle) : handle_(handle) {}

  const cudaStream_t handle_;
};

}  // namespace weft::kernels::cuda
