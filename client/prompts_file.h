#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// Parses one JSON object per line: `prompt` or `prompt_token_ids`, and any of `cache_salt` and the
// fields of SamplingParams (n: 1 only); a field that is absent or null comes from `defaults`. A
// field given twice is refused. Empty lines are skipped. INVALID_ARGUMENT names `file_name`, the
// line and what is wrong with it.
absl::StatusOr<std::vector<v1::GenerateRequest>> ParsePromptsFile(
    std::string_view contents, std::string_view file_name, const v1::SamplingParams& defaults);

// Likewise, of the file of that name; at least one. NOT_FOUND when it cannot be read.
absl::StatusOr<std::vector<v1::GenerateRequest>> ReadPromptsFile(
    const std::string& file_name, const v1::SamplingParams& defaults);

// Parses "1,2,3". INVALID_ARGUMENT names what is not a token id.
absl::StatusOr<std::vector<std::int32_t>> ParseTokenIds(std::string_view list);

}  // namespace weft
