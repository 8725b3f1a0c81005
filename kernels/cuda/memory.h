#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace weft::kernels::cuda {

// Memory of the thread's current device. RESOURCE_EXHAUSTED, with the sizes, when it cannot be had.
absl::StatusOr<void*> AllocateOnDevice(std::int64_t bytes, std::string_view what);

}  // namespace weft::kernels::cuda
