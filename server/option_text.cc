#include "server/option_text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "fmt/format.h"

namespace weft {
namespace {

std::string Lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

}  // namespace

std::optional<bool> ParseBool(std::string_view text) {
  const std::string lower = Lower(text);
  for (const char* word : {"true", "1", "yes", "on"}) {
    if (lower == word) return true;
  }
  for (const char* word : {"false", "0", "no", "off"}) {
    if (lower == word) return false;
  }
  return std::nullopt;
}

std::optional<absl::Duration> ParseOptionDuration(std::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(std::string(text), &duration)) return std::nullopt;
  if (duration < absl::ZeroDuration()) return std::nullopt;
  return duration;
}

std::optional<std::int64_t> ParseBytes(std::string_view text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  const std::string unit = Lower(std::string_view(rest, static_cast<std::size_t>(end - rest)));
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},         {"b", 1},    {"kib", 1024.0}, {"mib", 1048576.0}, {"gib", 0x1p30},
      {"tib", 0x1p40}, {"kb", 1e3}, {"mb", 1e6},     {"gb", 1e9},        {"tb", 1e12}};
  // Plain numbers exactly: a double would round above 2^53.
  if (unit.empty()) return ParseNumber<std::int64_t>(text, std::nullopt);
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    const double bytes = number * factor;
    if (bytes >= 0x1p63) return std::nullopt;
    return static_cast<std::int64_t>(bytes);
  }
  return std::nullopt;
}

template <typename T>
std::optional<T> ParseNumber(std::string_view text, const std::optional<Range>& range) {
  T value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return std::nullopt;
  }
  const auto wide = static_cast<long double>(value);
  if (range.has_value() && (wide < range->min || wide > range->max)) return std::nullopt;
  return value;
}

template std::optional<std::int32_t> ParseNumber(std::string_view, const std::optional<Range>&);
template std::optional<std::int64_t> ParseNumber(std::string_view, const std::optional<Range>&);
template std::optional<std::uint64_t> ParseNumber(std::string_view, const std::optional<Range>&);
template std::optional<double> ParseNumber(std::string_view, const std::optional<Range>&);

std::string DescribeRange(std::string_view what, const std::optional<Range>& range) {
  if (!range.has_value()) return std::string(what);
  const auto number = [](long double value) {
    return value == std::floor(value) && std::abs(value) < 1e20L ? fmt::format("{:.0f}", value)
                                                                 : fmt::format("{:g}", value);
  };
  return fmt::format("{} from {} to {}", what, number(range->min), number(range->max));
}

std::vector<std::string> SplitList(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) parts.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return parts;
}

}  // namespace weft
