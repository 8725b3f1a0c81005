#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace weft {

enum class Utf8Kind {
  kCharacter,   // A whole well-formed character.
  kIncomplete,  // The beginning of one, cut off by the end of the bytes.
  kInvalid,     // Not UTF-8: the maximal part that stands for one U+FFFD (Unicode, table 3-8).
};

struct Utf8Part {
  Utf8Kind kind;
  std::size_t num_bytes;  // 1..4
};

// What `bytes`, which are not empty, start with.
Utf8Part ScanUtf8(std::string_view bytes);

// The offset of the first byte that is not part of a whole well-formed character.
std::optional<std::size_t> FindInvalidUtf8(std::string_view bytes);

}  // namespace weft
