#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "server/options.h"

namespace weft {

// Texts of option values, to and from. The parsers take the whole text or give nothing.
std::optional<bool> ParseBool(std::string_view text);  // true/false, 1/0, yes/no, on/off
std::optional<absl::Duration> ParseOptionDuration(std::string_view text);
std::optional<std::int64_t> ParseBytes(std::string_view text);
// T is int32_t, int64_t, uint64_t or double. Nothing outside `range`, and no infinity or NaN.
template <typename T>
std::optional<T> ParseNumber(std::string_view text, const std::optional<Range>& range);

// "an integer from 1 to 1024"; `what` is "an integer" or "a number".
std::string DescribeRange(std::string_view what, const std::optional<Range>& range);
// "a,,b" has two parts.
std::vector<std::string> SplitList(std::string_view text);

}  // namespace weft
