#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "router/text/tokenizer.h"

namespace weft {

// The token sequences that spell `word`, as vLLM takes them: the word as at the beginning of a text
// and, where it begins with another token but is as long, as behind a space. INVALID_ARGUMENT when
// the word has no token.
absl::StatusOr<std::vector<std::vector<std::int32_t>>> BadWordTokens(const Tokenizer& tokenizer,
                                                                     const std::string& word);

}  // namespace weft
