#include "server/base/parse_json.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace weft {

absl::StatusOr<nlohmann::ordered_json> ParseJson(std::string_view text) {
  using Json = nlohmann::ordered_json;
  std::string wrong;
  std::vector<std::set<std::string>> keys;  // of the objects around
  const auto look = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth >= kMaxJsonDepth && wrong.empty()) {
      wrong = fmt::format("nests deeper than {}", kMaxJsonDepth);
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && wrong.empty() &&
        !keys.back().insert(value.get<std::string>()).second) {
      wrong = fmt::format("`{}` is there twice", value.get<std::string>());
    }
    return wrong.empty();  // else what follows is not kept
  };
  try {
    Json json = Json::parse(text, look);
    if (!wrong.empty()) return absl::InvalidArgumentError(wrong);
    return json;
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: ..."
    const std::string_view what = error.what();
    const std::size_t end = what.find("] ");
    return absl::InvalidArgumentError(
        fmt::format("not JSON: {}", end == std::string_view::npos ? what : what.substr(end + 2)));
  }
}

}  // namespace weft
