#pragma once

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/filtered_sample.h"

namespace weft::kernels::cuda {

// All pointers are in the device's memory. A row takes a block, which reads the row a few dozen
// times; it stays in the device's cache.
absl::Status FilteredSample(const FilteredSampleParams& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
