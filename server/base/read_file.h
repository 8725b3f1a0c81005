#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace weft {

// A whole file. NOT_FOUND when there is none or it cannot be read, INVALID_ARGUMENT when it has
// more than `max_bytes`; both name the path.
absl::StatusOr<std::string> ReadFile(const std::string& path, std::uintmax_t max_bytes);

// Which file stands at a path, and when it was written last: differs once it has changed. Zeros
// when there is none.
using FileStamp = std::array<std::int64_t, 4>;
FileStamp StampFile(const std::string& path);

}  // namespace weft
