#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace weft {

// Raises this process's limit of open files (RLIMIT_NOFILE) as far as it may go; children inherit
// it. FAILED_PRECONDITION when that is below `at_least`: libraries below us end the process when
// they get no descriptor.
absl::Status RaiseFileLimit(std::int64_t at_least);

// What a mere client needs, and what a router or a rank does.
inline constexpr std::int64_t kMinClientFiles = 64;
inline constexpr std::int64_t kMinServerFiles = 256;

}  // namespace weft
