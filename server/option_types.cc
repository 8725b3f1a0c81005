// What each type of option takes and how it is written: OptionParser::Add().

#include <limits>
#include <type_traits>
#include <utility>

#include "fmt/format.h"
#include "server/option_text.h"
#include "server/options.h"

namespace weft {
namespace {

using MaybeRange = std::optional<Range>;

// How the text of a T is read, and named in messages.
template <typename T>
struct Text {  // a number
  static std::optional<T> Parse(const std::string& text, const MaybeRange& range) {
    return ParseNumber<T>(text, range);
  }
  static std::string Takes(const MaybeRange& range) {
    if constexpr (std::is_integral_v<T>) {
      const Range any(std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
      return DescribeRange("an integer", range.value_or(any));
    }
    return DescribeRange("a number", range);
  }
  static std::string Show(const T& value) { return fmt::format("{}", value); }
  static constexpr char kKind[] = "NUMBER";
  static constexpr bool kIsText = false;
};

template <>
struct Text<std::string> {
  static std::optional<std::string> Parse(const std::string& text, const MaybeRange&) {
    return text;
  }
  static std::string Takes(const MaybeRange&) { return "one text"; }
  static std::string Show(const std::string& value) { return value; }
  static constexpr char kKind[] = "TEXT";
  static constexpr bool kIsText = true;
};

template <>
struct Text<bool> {
  static std::optional<bool> Parse(const std::string& text, const MaybeRange&) {
    return ParseBool(text);
  }
  static std::string Takes(const MaybeRange&) { return "true or false"; }
  static std::string Show(bool value) { return value ? "true" : "false"; }
  static constexpr char kKind[] = "";
  static constexpr bool kIsText = false;
};

template <>
struct Text<absl::Duration> {
  static std::optional<absl::Duration> Parse(const std::string& text, const MaybeRange&) {
    return ParseOptionDuration(text);
  }
  static std::string Takes(const MaybeRange&) { return "a duration such as 500ms, 3s or 1h30m"; }
  static std::string Show(absl::Duration value) { return absl::FormatDuration(value); }
  static constexpr char kKind[] = "DURATION";
  static constexpr bool kIsText = true;
};

struct Bytes : Text<std::int64_t> {
  static std::optional<std::int64_t> Parse(const std::string& text, const MaybeRange&) {
    return ParseBytes(text);
  }
  static std::string Takes(const MaybeRange&) {
    return "a number of bytes, plain or with KiB, MiB, GiB, TiB, KB, MB, GB or TB";
  }
  static constexpr char kKind[] = "BYTES";
};

// Where the values go: a T, a std::optional<T> or a std::vector<T>.
template <typename T>
struct Place {
  using Element = T;
  static constexpr bool kIsList = false;
  static void Assign(T* target, std::vector<T> values) { *target = std::move(values[0]); }
  static std::vector<T> Elements(const T& value) { return {value}; }
};
template <typename T>
struct Place<std::optional<T>> {
  using Element = T;
  static constexpr bool kIsList = false;
  static void Assign(std::optional<T>* target, std::vector<T> values) {
    *target = std::move(values[0]);
  }
  static std::vector<T> Elements(const std::optional<T>& value) {
    return value.has_value() ? std::vector<T>{*value} : std::vector<T>{};
  }
};
template <typename T>
struct Place<std::vector<T>> {
  using Element = T;
  static constexpr bool kIsList = true;
  static void Assign(std::vector<T>* target, std::vector<T> values) { *target = std::move(values); }
  static std::vector<T> Elements(const std::vector<T>& value) { return value; }
};

template <typename T, typename Codec>
auto Setter(T* target, MaybeRange range) {
  return [=](const std::vector<std::string>& texts) -> std::optional<std::string> {
    std::vector<typename Place<T>::Element> values;
    for (const std::string& text : texts) {
      auto value = Codec::Parse(text, range);
      if (!value.has_value()) return text;
      values.push_back(*std::move(value));
    }
    Place<T>::Assign(target, std::move(values));
    return std::nullopt;
  };
}

template <typename T, typename Codec>
auto Shower(const T* target) {
  return [target] {
    std::vector<std::string> texts;
    for (const auto& value : Place<T>::Elements(*target)) texts.push_back(Codec::Show(value));
    return texts;
  };
}

}  // namespace

template <typename T>
void OptionParser::Add(std::string_view names, T* value, std::string_view help, MaybeRange range) {
  using Codec = Text<typename Place<T>::Element>;
  AddValue(names,
           {.set = Setter<T, Codec>(value, range),
            .show = Shower<T, Codec>(value),
            .takes = Codec::Takes(range),
            .kind = Codec::kKind,
            .is_flag = std::is_same_v<typename Place<T>::Element, bool>,
            .is_list = Place<T>::kIsList,
            .is_text = Codec::kIsText},
           help);
}

void OptionParser::AddTexts(std::string_view names, std::vector<std::string>* value,
                            std::string_view help) {
  using Codec = Text<std::string>;
  AddValue(names,
           {.set = Setter<std::vector<std::string>, Codec>(value, std::nullopt),
            .show = Shower<std::vector<std::string>, Codec>(value),
            .takes = Codec::Takes(std::nullopt),
            .kind = Codec::kKind,
            .is_list = true,
            .splits = false,
            .is_text = true},
           help);
}

template <typename T>
void OptionParser::AddBytes(std::string_view names, T* value, std::string_view help) {
  AddValue(names,
           {.set = Setter<T, Bytes>(value, std::nullopt),
            .show = Shower<T, Bytes>(value),
            .takes = Bytes::Takes(std::nullopt),
            .kind = Bytes::kKind},
           help);
}

void OptionParser::AddIndexed(std::string_view names, std::vector<std::string> allowed,
                              std::function<void(std::size_t)> set,
                              std::function<std::size_t()> get, std::string_view help) {
  std::string choices;
  for (const std::string& choice : allowed) choices += (choices.empty() ? "" : "|") + choice;
  AddValue(
      names,
      {.set = [allowed, set](const std::vector<std::string>& texts) -> std::optional<std::string> {
         for (std::size_t i = 0; i < allowed.size(); ++i) {
           if (allowed[i] != texts[0]) continue;
           set(i);
           return std::nullopt;
         }
         return texts[0];
       },
       .show = [allowed, get] { return std::vector<std::string>{allowed[get()]}; },
       .takes = fmt::format("one of {}", choices),
       .kind = choices,
       .is_text = true},
      help);
}

void OptionParser::AddChoice(std::string_view names, std::string* value,
                             std::vector<std::string> allowed, std::string_view help) {
  std::vector<std::pair<std::string, std::string>> same;
  for (const std::string& text : allowed) same.emplace_back(text, text);
  AddEnum<std::string>(names, value, std::move(same), help);
}

#define WEFT_OPTION_TYPE(T) \
  template void OptionParser::Add(std::string_view, T*, std::string_view, MaybeRange)
#define WEFT_OPTION_TYPES(T)          \
  WEFT_OPTION_TYPE(T);                \
  WEFT_OPTION_TYPE(std::optional<T>); \
  WEFT_OPTION_TYPE(std::vector<T>)
WEFT_OPTION_TYPES(std::string);
WEFT_OPTION_TYPES(std::int32_t);
WEFT_OPTION_TYPES(std::int64_t);
WEFT_OPTION_TYPES(std::uint64_t);
WEFT_OPTION_TYPES(double);
WEFT_OPTION_TYPES(absl::Duration);
WEFT_OPTION_TYPE(bool);
WEFT_OPTION_TYPE(std::optional<bool>);
template void OptionParser::AddBytes(std::string_view, std::int64_t*, std::string_view);
template void OptionParser::AddBytes(std::string_view, std::optional<std::int64_t>*,
                                     std::string_view);

}  // namespace weft
