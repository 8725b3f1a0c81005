#include "router/text/utf8.h"

#include <cstdint>

namespace weft {

Utf8Part ScanUtf8(std::string_view bytes) {
  const auto first = static_cast<std::uint8_t>(bytes[0]);
  if (first < 0x80) return {Utf8Kind::kCharacter, 1};
  if (first < 0xC2 || first > 0xF4) return {Utf8Kind::kInvalid, 1};
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte's range keeps out overlong forms, surrogates and what is above U+10FFFF.
  std::uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  std::uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8Kind::kIncomplete, i};
    const auto byte = static_cast<std::uint8_t>(bytes[i]);
    if (byte < low || byte > high) return {Utf8Kind::kInvalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kCharacter, length};
}

std::optional<std::size_t> FindInvalidUtf8(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const Utf8Part part = ScanUtf8(bytes.substr(i));
    if (part.kind != Utf8Kind::kCharacter) return i;
    i += part.num_bytes;
  }
  return std::nullopt;
}

}  // namespace weft
