#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"
#include "kernels/device/device_limits.h"
#include "kernels/moe.h"

// kernels/moe.h on a GPU; all pointers are in the device's memory.

namespace weft::kernels::cuda {

// `scratch` is not used. INVALID_ARGUMENT for more than kMaxDeviceExperts experts.
absl::Status RouteRows(const RouteRowsParams& params, CudaStream& stream);

absl::Status SortByExpert(const SortByExpertParams& params, CudaStream& stream);

// As kernels::CombineExperts(); weights are fp32.
template <typename T>
struct CombineExpertsParams {
  const T* in;                   // [routed rows, size]
  const std::int32_t* place_of;  // [num_rows, top_k]; -1 adds nothing
  const float* weights;          // [num_rows, top_k]
  const T* residual;             // [num_rows, size], or null; may be out
  T* out;                        // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t top_k;
  std::int32_t size;
};

template <typename T>
absl::Status CombineExperts(const CombineExpertsParams<T>& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
