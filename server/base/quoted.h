#pragma once

#include <string>
#include <string_view>

namespace weft {

// For an error message: in quotes, on one line, not endless.
std::string Quoted(std::string_view text);

}  // namespace weft
