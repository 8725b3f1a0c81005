#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace weft {

inline constexpr int kMaxJsonDepth = 64;

// A JSON text that a user wrote. INVALID_ARGUMENT says where it is none, that it nests deeper than
// kMaxJsonDepth (nlohmann's dump() is recursive), or which key an object has twice.
absl::StatusOr<nlohmann::ordered_json> ParseJson(std::string_view text);

}  // namespace weft
