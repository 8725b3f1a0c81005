#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "router/text/tokenizer.h"

namespace weft {

inline constexpr std::int32_t kEndToken = 256;  // "<end>", a special token

// A tokenizer whose ids are the bytes of the text, and kEndToken.
std::unique_ptr<Tokenizer> ByteTokenizer();

// What it makes of text without "<end>".
std::vector<std::int32_t> ByteIds(std::string_view text);

}  // namespace weft
