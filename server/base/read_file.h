#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weft {

// A whole file. NOT_FOUND when there is none or it cannot be read, INVALID_ARGUMENT when it has
// more than `max_bytes`; both name the path.
absl::StatusOr<std::string> ReadFile(const std::string& path, std::uintmax_t max_bytes);

}  // namespace weft
