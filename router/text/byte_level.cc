#include "router/text/byte_level.h"

#include <array>

namespace weft {
namespace {

// The last stand-in is U+0143: 256 + 68 - 1, as 68 bytes are not printable.
constexpr int kNumCodePoints = 0x144;

struct Tables {
  std::array<std::uint16_t, 256> code_point_of_byte;
  std::array<std::int16_t, kNumCodePoints> byte_of_code_point;  // -1: none
};

constexpr Tables MakeTables() {
  Tables tables{};
  for (auto& byte : tables.byte_of_code_point) byte = -1;
  std::uint16_t next_stand_in = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    const auto code_point = printable ? static_cast<std::uint16_t>(byte) : next_stand_in++;
    tables.code_point_of_byte[byte] = code_point;
    tables.byte_of_code_point[code_point] = static_cast<std::int16_t>(byte);
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

}  // namespace

std::string ByteLevelSpelling(std::uint8_t byte) {
  const std::uint16_t code_point = kTables.code_point_of_byte[byte];
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

std::optional<std::string> ByteLevelBytes(std::string_view spelling) {
  std::string bytes;
  for (std::size_t i = 0; i < spelling.size(); ++i) {
    const auto first = static_cast<std::uint8_t>(spelling[i]);
    int code_point = first;
    if (first >= 0x80) {
      if ((first & 0xE0) != 0xC0) return std::nullopt;  // Three or four bytes: above U+07FF.
      code_point = (first & 0x1F) << 6 | (static_cast<std::uint8_t>(spelling[++i]) & 0x3F);
    }
    if (code_point >= kNumCodePoints || kTables.byte_of_code_point[code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kTables.byte_of_code_point[code_point]));
  }
  return bytes;
}

}  // namespace weft
