#include "router/text/jinja_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "absl/status/status.h"

namespace weft::jinja {
namespace {

// str.isspace() of Python, in UTF-8.
constexpr std::string_view kWhitespace =
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000";

bool Continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

std::size_t FirstCharacterBytes(std::string_view text) {
  std::size_t bytes = 1;
  while (bytes < text.size() && Continues(text[bytes])) ++bytes;
  return bytes;
}

std::size_t LastCharacterBytes(std::string_view text) {
  std::size_t bytes = 1;
  while (bytes < text.size() && Continues(text[text.size() - bytes])) ++bytes;
  return bytes;
}

absl::StatusOr<std::string> MapAscii(std::string_view text, char first, char last, int shift) {
  std::string result(text);
  for (char& c : result) {
    if (static_cast<unsigned char>(c) >= 0x80) {
      return absl::InvalidArgumentError("the case of text that is not ASCII is not supported");
    }
    if (c >= first && c <= last) c = static_cast<char>(c + shift);
  }
  return result;
}

}  // namespace

absl::StatusOr<std::string> ToText(const Value& value) {
  if (value.string() != nullptr) return *value.string();
  if (value.integer() != nullptr) return std::to_string(*value.integer());
  if (value.boolean() != nullptr) return *value.boolean() ? "True" : "False";
  if (value.is_none()) return "None";
  if (value.is_undefined()) return "";
  return absl::InvalidArgumentError(fmt::format("{} as text is not supported", value.KindName()));
}

std::string_view StripAny(std::string_view text, std::string_view characters, Side side) {
  while (side != Side::kRight && !text.empty()) {
    const std::size_t bytes = FirstCharacterBytes(text);
    if (characters.find(text.substr(0, bytes)) == std::string_view::npos) break;
    text.remove_prefix(bytes);
  }
  while (side != Side::kLeft && !text.empty()) {
    const std::size_t bytes = LastCharacterBytes(text);
    if (characters.find(text.substr(text.size() - bytes)) == std::string_view::npos) break;
    text.remove_suffix(bytes);
  }
  return text;
}

std::string_view Strip(std::string_view text, Side side) {
  return StripAny(text, kWhitespace, side);
}

List Split(std::string_view text, std::string_view separator, std::int64_t max_splits) {
  List parts;
  while (max_splits < 0 || static_cast<std::int64_t>(parts.size()) < max_splits) {
    const std::size_t at = text.find(separator);
    if (at == std::string_view::npos) break;
    parts.emplace_back(std::string(text.substr(0, at)));
    text.remove_prefix(at + separator.size());
  }
  parts.emplace_back(std::string(text));
  return parts;
}

List SplitWords(std::string_view text) {
  List parts;
  for (text = Strip(text, Side::kLeft); !text.empty(); text = Strip(text, Side::kLeft)) {
    std::size_t end = 0;
    while (end < text.size()) {
      const std::size_t bytes = FirstCharacterBytes(text.substr(end));
      if (kWhitespace.find(text.substr(end, bytes)) != std::string_view::npos) break;
      end += bytes;
    }
    parts.emplace_back(std::string(text.substr(0, end)));
    text.remove_prefix(end);
  }
  return parts;
}

absl::StatusOr<std::string> ReplaceAll(std::string_view text, std::string_view from,
                                       std::string_view to) {
  std::string result;
  while (true) {
    const std::size_t at = text.find(from);
    result += text.substr(0, at);
    if (at == std::string_view::npos) return result;
    result += to;
    if (result.size() > kMaxTextBytes) {
      return absl::ResourceExhaustedError(
          fmt::format("replace makes more than {} bytes", kMaxTextBytes));
    }
    text.remove_prefix(at + from.size());
  }
}

absl::StatusOr<std::string> ToUpper(std::string_view text) {
  return MapAscii(text, 'a', 'z', 'A' - 'a');
}

absl::StatusOr<std::string> ToLower(std::string_view text) {
  return MapAscii(text, 'A', 'Z', 'a' - 'A');
}

std::int64_t Length(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return !Continues(c); });
}

}  // namespace weft::jinja
