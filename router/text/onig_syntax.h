#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace weft {

// Rewrites `pattern` from Oniguruma's Ruby syntax, with the Unicode tables of its version 6.9.10,
// to PCRE2's, with those of Unicode 14 (options UTF, UCP, MULTILINE; newline LF).
// INVALID_ARGUMENT names what has no equal: word classes and boundaries, scripts, named groups...
absl::StatusOr<std::string> OnigToPcre2(std::string_view pattern);

// The body of a PCRE2 class (without brackets) that matches general category `name` ("L", "Nd") of
// Unicode 16.
std::string CategoryClass(std::string_view name);

}  // namespace weft
