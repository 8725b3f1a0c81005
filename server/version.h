#pragma once

#include <string_view>

namespace weft {

// As `--version` prints it: "0.1.0".
std::string_view Version();

}  // namespace weft
