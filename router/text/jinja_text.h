#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "router/text/jinja_value.h"

// What Python's str methods do, for the methods and filters of templates.
namespace weft::jinja {

// Of what one operation makes.
inline constexpr std::size_t kMaxTextBytes = std::size_t{64} << 20;

// Python's str(); nothing for lists and dicts.
absl::StatusOr<std::string> ToText(const Value& value);

enum class Side : std::uint8_t { kLeft, kRight, kBoth };
// Whitespace is what Unicode calls so.
std::string_view Strip(std::string_view text, Side side);
// Removes characters that are in `characters`.
std::string_view StripAny(std::string_view text, std::string_view characters, Side side);

// `separator` is not empty; max_splits < 0 is all.
List Split(std::string_view text, std::string_view separator, std::int64_t max_splits);
// At runs of whitespace.
List SplitWords(std::string_view text);
// RESOURCE_EXHAUSTED beyond kMaxTextBytes.
absl::StatusOr<std::string> ReplaceAll(std::string_view text, std::string_view from,
                                       std::string_view to);
// Of ASCII; INVALID_ARGUMENT for other text.
absl::StatusOr<std::string> ToUpper(std::string_view text);
absl::StatusOr<std::string> ToLower(std::string_view text);
// In characters.
std::int64_t Length(std::string_view text);

}  // namespace weft::jinja
