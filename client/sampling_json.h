#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"
#include "weft/v1/inference.pb.h"

namespace weft {

// Sets the field of `sampling` called `key`; a list or a map replaces what is there. `logit_bias`
// is an object from token ids to numbers, `bad_words_token_ids` a list of lists of ids.
// INVALID_ARGUMENT says what type is wanted. NOT_FOUND: no field is called so.
absl::Status SetSamplingField(const std::string& key, const nlohmann::ordered_json& value,
                              v1::SamplingParams& sampling);

// Every field's name, comma-separated.
std::string SamplingFieldNames();

// INVALID_ARGUMENT says that `key` wants a list of token ids, and what it is.
absl::StatusOr<std::vector<std::int32_t>> TokenIdsFromJson(const std::string& key,
                                                           const nlohmann::ordered_json& value);

// INVALID_ARGUMENT: `key` is `value`; `wanted` is wanted.
absl::Status WrongJsonType(const std::string& key, std::string_view wanted,
                           const nlohmann::ordered_json& value);

}  // namespace weft
