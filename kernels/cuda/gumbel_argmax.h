#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/gumbel_argmax.h"

namespace weft::kernels::cuda {

// kernels::GumbelArgmax() on a GPU: the same scores and tokens bit for bit, logsumexp to within
// rounding. All pointers are in the device's memory. `workspace`: GumbelArgmaxWorkspaceBytes().
absl::Status GumbelArgmax(const GumbelArgmaxParams& params, void* workspace, CudaStream& stream);

std::int64_t GumbelArgmaxWorkspaceBytes(std::int32_t max_rows);

}  // namespace weft::kernels::cuda
