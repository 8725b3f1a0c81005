#pragma once

#include <cstdint>
#include <string>

namespace weft {

// For people: "1.5 MiB".
std::string FormatBytes(std::uint64_t bytes);

}  // namespace weft
