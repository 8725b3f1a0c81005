#include "router/text/jinja_lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "server/base/status_macros.h"

namespace weft::jinja {
namespace {

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

void AppendUtf8(std::uint32_t c, std::string& out) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
  } else {
    out += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 0x3F)),
            static_cast<char>(0x80 | (c & 0x3F))};
  }
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    // As Jinja reads a file: one kind of line end, and none at the end.
    for (std::size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        if (i + 1 == source.size() || source[i + 1] != '\n') source_ += '\n';
      } else {
        source_ += source[i];
      }
    }
    if (source_.ends_with('\n')) source_.pop_back();
  }

  absl::StatusOr<std::vector<Token>> Run() {
    while (at_ < source_.size()) RETURN_IF_ERROR(TextAndTag());
    Add(Token::Kind::kEnd);
    return std::move(tokens_);
  }

 private:
  bool LooksAt(std::string_view text) const {
    return std::string_view(source_).substr(at_).starts_with(text);
  }
  void Advance(std::size_t bytes) {
    line_ +=
        static_cast<int>(std::count(source_.begin() + at_, source_.begin() + at_ + bytes, '\n'));
    at_ += bytes;
  }
  void Add(Token::Kind kind, std::string text = "", std::int64_t number = 0) {
    tokens_.push_back({.kind = kind, .line = line_, .text = std::move(text), .number = number});
  }

  // The text up to the next tag, then that tag.
  absl::Status TextAndTag() {
    const std::size_t begin = at_;
    std::size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 == source_.size()) tag = source_.size();
      if (tag == source_.size()) break;
      if (source_[tag + 1] == '{' || source_[tag + 1] == '%' || source_[tag + 1] == '#') break;
      ++tag;
    }
    std::size_t end = tag;
    const char kind = tag < source_.size() ? source_[tag + 1] : '\0';
    const char sign = kind != '\0' && tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    if (sign == '-') {
      while (end > begin && IsSpace(source_[end - 1])) --end;
    } else if ((kind == '%' || kind == '#') && sign != '+') {  // lstrip_blocks
      std::size_t blank = end;
      while (blank > begin && IsSpace(source_[blank - 1]) && source_[blank - 1] != '\n') --blank;
      if (blank == 0 || source_[blank - 1] == '\n') end = blank;
    }
    if (end > begin) Add(Token::Kind::kText, source_.substr(begin, end - begin));
    Advance(tag - begin);
    if (kind == '\0') return absl::OkStatus();
    const bool has_sign = sign == '-' || (sign == '+' && kind != '{');
    if (kind == '#') return Comment();
    Add(kind == '{' ? Token::Kind::kOutputBegin : Token::Kind::kBlockBegin);
    Advance(has_sign ? 3 : 2);
    return Inside(kind == '{' ? "}}" : "%}",
                  kind == '{' ? Token::Kind::kOutputEnd : Token::Kind::kBlockEnd);
  }

  absl::Status Comment() {
    const std::size_t end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) return Error(line_, "the comment has no end");
    Advance(end - 1 - at_);
    AfterTag(source_[at_] == '-' ? '-' : source_[at_] == '+' ? '+' : '\0', 3, true);
    return absl::OkStatus();
  }

  // Skips the end of a tag and the whitespace that it takes with it.
  void AfterTag(char sign, std::size_t bytes, bool is_block) {
    Advance(bytes);
    if (sign == '-') {
      std::size_t end = at_;
      while (end < source_.size() && IsSpace(source_[end])) ++end;
      Advance(end - at_);
    } else if (is_block && sign != '+' && LooksAt("\n")) {  // trim_blocks
      Advance(1);
    }
  }

  absl::Status Inside(std::string_view closing, Token::Kind closing_kind) {
    int depth = 0;
    while (true) {
      while (at_ < source_.size() && IsSpace(source_[at_])) Advance(1);
      if (at_ == source_.size()) return Error(line_, "the template ends inside a tag");
      const char c = source_[at_];
      if (depth == 0) {
        const bool is_block = closing_kind == Token::Kind::kBlockEnd;
        const bool signs = c == '-' || (c == '+' && is_block);
        if (std::string_view(source_).substr(at_ + (signs ? 1 : 0)).starts_with(closing)) {
          Add(closing_kind);
          AfterTag(signs ? c : '\0', signs ? 3 : 2, is_block);
          return absl::OkStatus();
        }
      }
      if (c == '\'' || c == '"') {
        RETURN_IF_ERROR(String(c));
      } else if (IsDigit(c)) {
        RETURN_IF_ERROR(Int());
      } else if (IsNameStart(c)) {
        std::size_t end = at_;
        while (end < source_.size() && (IsNameStart(source_[end]) || IsDigit(source_[end]))) ++end;
        Add(Token::Kind::kName, source_.substr(at_, end - at_));
        Advance(end - at_);
      } else {
        if (c == '(' || c == '[' || c == '{') ++depth;
        if (c == ')' || c == ']' || c == '}') --depth;
        RETURN_IF_ERROR(Operator());
      }
    }
  }

  absl::Status Operator() {
    constexpr std::array<std::string_view, 24> kOperators = {
        "==", "!=", "<=", ">=", "//", "<", ">", "+", "-", "*", "/", "%",
        "~",  "(",  ")",  "[",  "]",  "{", "}", ",", ":", ".", "|", "="};
    for (const std::string_view op : kOperators) {
      if (!LooksAt(op)) continue;
      Add(Token::Kind::kOperator, std::string(op));
      Advance(op.size());
      return absl::OkStatus();
    }
    return Error(line_, fmt::format("the character '{}' is not expected", source_[at_]));
  }

  absl::Status Int() {
    std::int64_t value = 0;
    const char* begin = source_.data() + at_;
    const auto [end, error] = std::from_chars(begin, source_.data() + source_.size(), value);
    if (error != std::errc()) return Error(line_, "an integer does not fit into 64 bits");
    const bool is_float = *end == '.' && IsDigit(end[1]);  // the string ends in '\0'
    if (is_float || IsNameStart(*end)) {
      return Error(line_, "only decimal integers are supported as numbers");
    }
    Add(Token::Kind::kInt, std::string(begin, end), value);
    Advance(end - begin);
    return absl::OkStatus();
  }

  absl::Status String(char quote) {
    std::string text;
    const int line = line_;
    Advance(1);
    while (at_ < source_.size() && source_[at_] != quote) {
      if (source_[at_] == '\\') {
        RETURN_IF_ERROR(Escape(text));
      } else {
        text += source_[at_];
        Advance(1);
      }
    }
    if (at_ == source_.size()) return Error(line, "the string has no end");
    Add(Token::Kind::kString, std::move(text));
    Advance(1);
    return absl::OkStatus();
  }

  absl::Status Escape(std::string& text) {
    if (at_ + 1 == source_.size()) return Error(line_, "the string has no end");
    const char c = source_[at_ + 1];
    constexpr std::string_view kNames = "ntrbfav\\'\"\n";
    constexpr std::string_view kValues = "\n\t\r\b\f\a\v\\'\"";
    if (const std::size_t i = kNames.find(c); i != std::string_view::npos) {
      if (i < kValues.size()) text += kValues[i];  // a continued line has no character
      Advance(2);
      return absl::OkStatus();
    }
    const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 0;
    if (digits == 0) return Error(line_, fmt::format("the escape \\{} is not supported", c));
    const std::string hex = source_.substr(at_ + 2, digits);
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
    if (hex.size() != digits || error != std::errc() || end != hex.data() + digits ||
        (value >= 0xD800 && value < 0xE000)) {
      return Error(line_, fmt::format("\\{}{} is not a character", c, hex));
    }
    AppendUtf8(value, text);
    Advance(2 + digits);
    return absl::OkStatus();
  }

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

absl::Status Error(int line, std::string_view what) {
  return absl::InvalidArgumentError(fmt::format("line {}: {}", line, what));
}

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) { return Lexer(source).Run(); }

}  // namespace weft::jinja
