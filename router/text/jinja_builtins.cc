#include "router/text/jinja_builtins.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <iterator>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "router/text/jinja_text.h"
#include "server/base/status_macros.h"

namespace weft::jinja {
namespace {

constexpr std::int64_t kMaxRange = 100'000;

absl::Status Unsupported(std::string_view what, std::string_view name) {
  return absl::InvalidArgumentError(fmt::format("the {} '{}' is not supported", what, name));
}

// Positional arguments, all of them strings, from `min` to `max` of them.
absl::Status CheckTexts(std::string_view name, const Arguments& arguments, std::size_t min,
                        std::size_t max) {
  const std::vector<Value>& values = arguments.values;
  const bool texts = std::all_of(values.begin(), values.end(),
                                 [](const Value& v) { return v.string() != nullptr; });
  if (texts && arguments.keywords.empty() && values.size() >= min && values.size() <= max) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(fmt::format("{} takes {} to {} strings here", name, min, max));
}

absl::StatusOr<Value> StripMethod(std::string_view name, const std::string& text, Side side,
                                  const Arguments& arguments) {
  RETURN_IF_ERROR(CheckTexts(name, arguments, 0, 1));
  if (arguments.values.empty()) return Value(std::string(Strip(text, side)));
  return Value(std::string(StripAny(text, *arguments.values[0].string(), side)));
}

absl::StatusOr<Value> SplitMethod(const std::string& text, const Arguments& arguments) {
  const std::vector<Value>& values = arguments.values;
  if (values.empty() && arguments.keywords.empty()) return Value(SplitWords(text));
  const std::int64_t* max_splits = values.size() == 2 ? values[1].integer() : nullptr;
  if (values.size() > 2 || values.empty() || (values.size() == 2 && max_splits == nullptr) ||
      values[0].string() == nullptr || values[0].string()->empty() || !arguments.keywords.empty()) {
    return absl::InvalidArgumentError("split takes a string and perhaps an integer here");
  }
  return Value(Split(text, *values[0].string(), max_splits == nullptr ? -1 : *max_splits));
}

absl::StatusOr<Value> ReplaceText(const std::string& text, const Arguments& arguments) {
  RETURN_IF_ERROR(CheckTexts("replace", arguments, 2, 2));
  const std::string& from = *arguments.values[0].string();
  if (from.empty()) return absl::InvalidArgumentError("replace takes a string that is not empty");
  ASSIGN_OR_RETURN(std::string replaced, ReplaceAll(text, from, *arguments.values[1].string()));
  return Value(std::move(replaced));
}

absl::StatusOr<Value> TextMethod(const std::string& text, std::string_view name,
                                 const Arguments& arguments) {
  if (name == "strip") return StripMethod(name, text, Side::kBoth, arguments);
  if (name == "lstrip") return StripMethod(name, text, Side::kLeft, arguments);
  if (name == "rstrip") return StripMethod(name, text, Side::kRight, arguments);
  if (name == "split") return SplitMethod(text, arguments);
  if (name == "replace") return ReplaceText(text, arguments);
  if (name == "startswith" || name == "endswith") {
    RETURN_IF_ERROR(CheckTexts(name, arguments, 1, 1));
    const std::string& part = *arguments.values[0].string();
    return Value::Bool(name == "endswith" ? text.ends_with(part) : text.starts_with(part));
  }
  if (name == "upper" || name == "lower") {
    RETURN_IF_ERROR(CheckTexts(name, arguments, 0, 0));
    ASSIGN_OR_RETURN(std::string mapped, name == "upper" ? ToUpper(text) : ToLower(text));
    return Value(std::move(mapped));
  }
  return Unsupported("method of a string", name);
}

absl::StatusOr<Value> DictMethod(const Dict& dict, std::string_view name,
                                 const Arguments& arguments) {
  const std::vector<Value>& values = arguments.values;
  if (name == "get" && !values.empty() && values.size() <= 2 && values[0].string() != nullptr) {
    if (const Value* found = Find(dict, *values[0].string())) return *found;
    return values.size() == 2 ? values[1] : Value();
  }
  if (values.empty() && (name == "items" || name == "keys" || name == "values")) {
    List list;
    for (const auto& [key, value] : dict) {
      if (name == "keys") list.emplace_back(key);
      if (name == "values") list.push_back(value);
      if (name == "items") list.emplace_back(List{Value(key), value});
    }
    return Value(std::move(list));
  }
  return Unsupported("method of a dict, or what it is given,", name);
}

absl::StatusOr<Value> Range(const std::vector<Value>& values) {
  std::int64_t bounds[2] = {0, 0};  // begin, end
  const bool valid = !values.empty() && values.size() <= 2 &&
                     std::all_of(values.begin(), values.end(),
                                 [](const Value& v) { return v.integer() != nullptr; });
  if (valid) {
    bounds[1] = *values.back().integer();
    if (values.size() == 2) bounds[0] = *values[0].integer();
  }
  if (!valid || (bounds[1] > bounds[0] && (bounds[0] < -kMaxRange || bounds[1] > kMaxRange))) {
    return absl::InvalidArgumentError(
        fmt::format("range takes one or two integers from {} to {} here", -kMaxRange, kMaxRange));
  }
  List list;
  for (std::int64_t i = bounds[0]; i < bounds[1]; ++i) list.push_back(Value::Int(i));
  return Value(std::move(list));
}

absl::StatusOr<Value> StrftimeNow(const std::string& format) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  char text[256];
  const std::size_t bytes = std::strftime(text, sizeof(text), format.c_str(), &local);
  return Value(std::string(text, bytes));
}

absl::StatusOr<Value> LengthOf(const Value& value) {
  if (value.string() != nullptr) return Value::Int(Length(*value.string()));
  if (value.list() != nullptr) return Value::Int(static_cast<std::int64_t>(value.list()->size()));
  if (value.dict() != nullptr) return Value::Int(static_cast<std::int64_t>(value.dict()->size()));
  if (value.is_undefined()) return Value::Int(0);
  return absl::InvalidArgumentError(fmt::format("{} has no length", value.KindName()));
}

absl::StatusOr<Value> Join(const Value& value, const Arguments& arguments) {
  RETURN_IF_ERROR(CheckTexts("join", arguments, 0, 1));
  if (value.list() == nullptr) {
    return absl::InvalidArgumentError(fmt::format("join of {} is not supported", value.KindName()));
  }
  std::string result;
  for (const Value& item : *value.list()) {
    if (&item != value.list()->data() && !arguments.values.empty()) {
      result += *arguments.values[0].string();
    }
    ASSIGN_OR_RETURN(const std::string text, ToText(item));
    result += text;
    if (result.size() > kMaxTextBytes) {
      return absl::ResourceExhaustedError(
          fmt::format("join makes more than {} bytes", kMaxTextBytes));
    }
  }
  return Value(std::move(result));
}

absl::StatusOr<Value> Default(const Value& value, const Arguments& arguments) {
  std::vector<Value> given = arguments.values;
  const Value* boolean = Find(arguments.keywords, "boolean");
  if (boolean != nullptr && given.size() == 1) given.push_back(*boolean);
  if (given.size() > 2 || arguments.keywords.size() > (boolean != nullptr ? 1 : 0)) {
    return absl::InvalidArgumentError("default takes a value and perhaps a boolean");
  }
  const bool also_false = given.size() == 2 && given[1].Truthy();
  if (!value.is_undefined() && !(also_false && !value.Truthy())) return value;
  return given.empty() ? Value(std::string()) : given[0];
}

}  // namespace

bool IsFunction(std::string_view name) {
  constexpr std::string_view kNames[] = {"raise_exception", "range", "namespace", "strftime_now"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

absl::StatusOr<Value> CallFunction(std::string_view name, const Arguments& arguments) {
  if (name == "raise_exception") {
    RETURN_IF_ERROR(CheckTexts(name, arguments, 1, 1));
    return absl::InvalidArgumentError(*arguments.values[0].string());
  }
  if (name == "range" && arguments.keywords.empty()) return Range(arguments.values);
  if (name == "strftime_now") {
    RETURN_IF_ERROR(CheckTexts(name, arguments, 1, 1));
    return StrftimeNow(*arguments.values[0].string());
  }
  if (name == "namespace" && arguments.values.empty()) {
    return Value(Value::Namespace{std::make_shared<Dict>(arguments.keywords)});
  }
  return Unsupported("function, or what it is given,", name);
}

absl::StatusOr<Value> CallMethod(const Value& object, std::string_view name,
                                 const Arguments& arguments) {
  if (object.string() != nullptr) return TextMethod(*object.string(), name, arguments);
  if (object.dict() != nullptr && object.namespace_attributes() == nullptr) {
    return DictMethod(*object.dict(), name, arguments);
  }
  if (object.is_undefined()) {
    return absl::InvalidArgumentError(fmt::format("'{}' is undefined", object.undefined_name()));
  }
  return Unsupported(fmt::format("method of {}", object.KindName()), name);
}

absl::StatusOr<Value> ApplyFilter(std::string_view name, const Value& value,
                                  const Arguments& arguments) {
  if (name == "default" || name == "d") return Default(value, arguments);
  if (name == "length" || name == "count") return LengthOf(value);
  if (name == "join") return Join(value, arguments);
  if (name == "list" && value.list() != nullptr) return value;
  if ((name == "first" || name == "last") && value.list() != nullptr) {
    const List& list = *value.list();
    if (list.empty()) return Value(Value::Undefined{std::string(name)});
    return name == "first" ? list.front() : list.back();
  }
  // The others take any value as its text.
  constexpr std::string_view kOfText[] = {"trim", "string", "safe", "upper", "lower", "replace"};
  if (std::find(std::begin(kOfText), std::end(kOfText), name) == std::end(kOfText)) {
    return Unsupported(fmt::format("filter, of {},", value.KindName()), name);
  }
  ASSIGN_OR_RETURN(std::string text, ToText(value));
  if (name == "trim") return StripMethod(name, text, Side::kBoth, arguments);
  if (name == "upper" || name == "lower" || name == "replace") {
    return TextMethod(text, name, arguments);
  }
  return Value(std::move(text));
}

absl::StatusOr<bool> ApplyTest(std::string_view name, const Value& value) {
  const bool is_dict = value.dict() != nullptr && value.namespace_attributes() == nullptr;
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is_none();
  if (name == "string") return value.string() != nullptr;
  if (name == "boolean") return value.boolean() != nullptr;
  if (name == "true") return value.boolean() != nullptr && *value.boolean();
  if (name == "false") return value.boolean() != nullptr && !*value.boolean();
  if (name == "integer") return value.integer() != nullptr;
  if (name == "number") return value.integer() != nullptr || value.boolean() != nullptr;
  if (name == "mapping") return is_dict;
  if (name == "sequence" || name == "iterable") {
    return value.string() != nullptr || value.list() != nullptr || is_dict || value.is_undefined();
  }
  return Unsupported("test", name);
}

}  // namespace weft::jinja
