#pragma once

#include "absl/status/status.h"
#include "kernels/cuda/stream.h"
#include "kernels/kv_copy.h"

namespace weft::kernels::cuda {

// See kernels/kv_copy.h. INVALID_ARGUMENT for values of other sizes.
absl::Status KvCopy(const KvCopyParams& params, CudaStream& stream);

}  // namespace weft::kernels::cuda
