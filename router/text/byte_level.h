#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

// Byte-level vocabularies spell each byte as one printable character: itself where it is printable
// in Latin-1, else a stand-in from U+0100 on (a space is U+0120).

// `byte` as a vocabulary spells it.
std::string ByteLevelSpelling(std::uint8_t byte);

// The bytes that `spelling`, valid UTF-8, stands for; empty optional if it has a character that
// stands for no byte.
std::optional<std::string> ByteLevelBytes(std::string_view spelling);

}  // namespace weft
