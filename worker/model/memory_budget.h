#pragma once

#include <cstdint>

namespace weft {

// Bytes of memory this process may still count on: MemAvailable, or what is left under the cgroup's
// limit when that is less.
std::int64_t AvailableMemoryBytes();

}  // namespace weft
