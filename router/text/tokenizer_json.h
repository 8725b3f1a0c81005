#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "router/text/added_tokens.h"
#include "router/text/bpe.h"
#include "router/text/pre_tokenizer.h"

namespace weft {

// What a tokenizer.json says, checked.
struct TokenizerSpec {
  std::vector<std::pair<std::string, std::int32_t>>
      vocabulary;  // as spelled in the file; each id once
  BpeSpec bpe;
  std::vector<AddedToken> added_tokens;  // each id and content once; some are in the vocabulary too
  bool normalize_nfc = false;
  PreTokenizer pre_tokenizer;
  std::vector<std::int32_t> prefix;  // what the post-processor puts before and after a text
  std::vector<std::int32_t> suffix;
};

// INVALID_ARGUMENT, naming `name` and the key, if `json` is malformed or needs what is not
// supported.
absl::StatusOr<TokenizerSpec> ParseTokenizerJson(std::string_view json, std::string_view name);

// Ids are below this: above any vocabulary known, and small enough for tables by id.
inline constexpr std::int32_t kMaxTokenIds = 1 << 22;

}  // namespace weft
