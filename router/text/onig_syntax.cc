#include "router/text/onig_syntax.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>

#include "absl/status/status.h"
#include "router/text/unicode_ranges.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// PCRE2's \s also has U+180E.
constexpr std::string_view kSpace =
    "\\t-\\r\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{"
    "3000}";
constexpr std::string_view kNotSpace =
    "\\x00-\\x08\\x0E-\\x1F\\x21-\\x84\\x86-\\x9F\\xA1-\\x{167F}\\x{1681}-\\x{1FFF}"
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}"
    "\\x{3001}-\\x{10FFFF}";

constexpr std::array<std::string_view, 36> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd",
    "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm",
    "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Co", "Cn"};

class Rewriter {
 public:
  explicit Rewriter(std::string_view pattern) : rest_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (!rest_.empty()) {
      RETURN_IF_ERROR(class_depth_ > 0 ? InClass() : OutsideClass());
    }
    if (class_depth_ > 0) return Refuse("a class without its ]");
    return std::move(out_);
  }

 private:
  static absl::Status Refuse(std::string_view what) {
    return absl::InvalidArgumentError(fmt::format("{} is not supported", what));
  }

  bool Take(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  void Copy(std::size_t num_bytes) {
    out_ += rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
  }

  absl::Status OutsideClass() {
    switch (rest_[0]) {
      case '\\':
        return Escape();
      case '[':
        OpenClass();
        return absl::OkStatus();
      case '(':
        return Group();
      case '{':
        return Repeat();
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  void OpenClass() {
    rest_.remove_prefix(1);
    out_ += '[';
    if (Take("^")) out_ += '^';
    if (Take("]")) out_ += "\\]";  // Both take a ] at the start for itself.
    class_depth_ = 1;
  }

  // A class within a class is the union in Ruby; PCRE2 has no such thing, but a union needs no
  // brackets.
  absl::Status InClass() {
    if (rest_.starts_with("[:")) return Refuse("[: :] in a class");
    if (rest_.starts_with("[^")) return Refuse("[^ in a class");
    if (rest_.starts_with("&&")) return Refuse("&& in a class");
    if (rest_[0] == '\\') return Escape();
    if (Take("[")) {
      ++class_depth_;
      return absl::OkStatus();
    }
    if (Take("]")) {
      if (--class_depth_ == 0) out_ += ']';
      return absl::OkStatus();
    }
    // Beside a class escape a hyphen means itself; it must not become a range with what the escape
    // is rewritten to.
    if (rest_[0] == '-' && (after_class_escape_ || AtClassEscape(rest_.substr(1)))) {
      Take("-");
      out_ += "\\-";
    } else {
      Copy(1);
    }
    after_class_escape_ = false;
    return absl::OkStatus();
  }

  static bool AtClassEscape(std::string_view text) {
    return text.size() > 1 && text[0] == '\\' &&
           std::string_view("sSdDpP").find(text[1]) != std::string_view::npos;
  }

  absl::Status Group() {
    // (?i) alone counts to the end of its group in both.
    for (const std::string_view known :
         {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)"}) {
      if (!rest_.starts_with(known)) continue;
      Copy(known.size());
      return absl::OkStatus();
    }
    if (rest_.starts_with("(?") || rest_.starts_with("(*")) {
      return Refuse(fmt::format("the group {}", rest_.substr(0, 4)));
    }
    Copy(1);
    return absl::OkStatus();
  }

  // {n}, {n,} and {n,m} are alike; what may follow them is not: {n}+ is possessive in PCRE2 only.
  absl::Status Repeat() {
    std::size_t end = 1;
    while (end < rest_.size() &&
           (std::isdigit(static_cast<unsigned char>(rest_[end])) != 0 || rest_[end] == ',')) {
      ++end;
    }
    if (end == 1 || rest_[1] == ',' || end == rest_.size() || rest_[end] != '}') {
      return Refuse("a { that is not {n}, {n,} or {n,m}");
    }
    ++end;
    const bool exact = rest_.substr(0, end).find(',') == std::string_view::npos;
    if (rest_.substr(end).starts_with("+") || (exact && rest_.substr(end).starts_with("?"))) {
      return Refuse(rest_.substr(0, end + 1));
    }
    Copy(end);
    return absl::OkStatus();
  }

  absl::Status Escape() {
    if (rest_.size() < 2) return Refuse("a \\ at the end");
    const char c = rest_[1];
    const bool in_class = class_depth_ > 0;
    if (std::string_view("pPsSdD").find(c) != std::string_view::npos) return ClassEscape();
    after_class_escape_ = false;
    if (c == 'x' || c == 'u') return CodePoint();
    if (c == 'v') {  // One character in Ruby, a class in PCRE2.
      rest_.remove_prefix(2);
      out_ += "\\x0B";
      return absl::OkStatus();
    }
    const bool known =
        std::isalnum(static_cast<unsigned char>(c)) == 0 ||
        std::string_view(in_class ? "tnrfae" : "tnrfaeAzZ").find(c) != std::string_view::npos;
    if (!known) return Refuse(rest_.substr(0, 2));
    Copy(2);
    return absl::OkStatus();
  }

  // \xHH below 80, \x{H..}, \uHHHH
  absl::Status CodePoint() {
    const bool short_form = rest_[1] == 'x';
    std::size_t begin = 2;
    std::size_t end = short_form ? 4 : 6;
    if (short_form && rest_.substr(2).starts_with("{")) {
      begin = 3;
      end = std::min(rest_.find('}'), rest_.size());
    }
    std::uint32_t value = 0;
    if (end > rest_.size() || end == begin || end - begin > 6) return Refuse(rest_.substr(0, 2));
    for (std::size_t i = begin; i < end; ++i) {
      const char c = rest_[i];
      if (std::isxdigit(static_cast<unsigned char>(c)) == 0) return Refuse(rest_.substr(0, 2));
      value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    // \xHH above is a lone byte of UTF-8 in Ruby.
    if (short_form && begin == 2 && value >= 0x80) return Refuse(rest_.substr(0, end));
    out_ += fmt::format("\\x{{{:X}}}", value);
    rest_.remove_prefix(std::min(end + (begin == 3 ? 1 : 0), rest_.size()));
    return absl::OkStatus();
  }

  absl::Status ClassEscape() {
    const char kind = rest_[1];
    bool negated = std::isupper(static_cast<unsigned char>(kind)) != 0;
    std::string body;
    std::size_t num_bytes = 2;
    if (kind == 's' || kind == 'S') {
      body = kSpace;
    } else if (kind == 'd' || kind == 'D') {
      body = CategoryClass("Nd");
    } else {
      const std::size_t end = rest_.find('}');
      if (!rest_.substr(2).starts_with("{") || end == std::string_view::npos) {
        return Refuse(fmt::format("\\{} without {{name}}", kind));
      }
      std::string_view name = rest_.substr(3, end - 3);
      if (name.starts_with("^")) {
        negated = !negated;
        name.remove_prefix(1);
      }
      if (std::find(kCategories.begin(), kCategories.end(), name) == kCategories.end()) {
        return Refuse(fmt::format("\\p{{{}}}, which is no general category,", name));
      }
      if (name == "C" || name == "Cn") return Refuse(fmt::format("\\p{{{}}}", name));
      body = CategoryClass(name);
      num_bytes = end + 1;
    }
    if (class_depth_ == 0) {
      out_ += fmt::format("[{}{}]", negated ? "^" : "", body);
    } else if (!negated) {
      out_ += body;
    } else if (kind == 'S') {
      out_ += kNotSpace;
    } else {
      return Refuse(fmt::format("{} in a class", rest_.substr(0, num_bytes)));
    }
    rest_.remove_prefix(num_bytes);
    after_class_escape_ = true;
    return absl::OkStatus();
  }

  std::string_view rest_;
  std::string out_;
  int class_depth_ = 0;
  bool after_class_escape_ = false;
};

}  // namespace

absl::StatusOr<std::string> OnigToPcre2(std::string_view pattern) {
  return Rewriter(pattern).Run();
}

std::string CategoryClass(std::string_view name) {
  std::string body = fmt::format("\\p{{{}}}", name);
  for (const CategoryRange& range : kAssignedSinceUnicode14) {
    if (!range.category.starts_with(name)) continue;
    body += fmt::format("\\x{{{:X}}}-\\x{{{:X}}}", range.first, range.last);
  }
  return body;
}

}  // namespace weft
