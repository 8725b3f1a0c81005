#include "router/text/jinja_value.h"

#include <algorithm>
#include <optional>

namespace weft::jinja {
namespace {

std::optional<std::int64_t> Number(const Value& value) {
  if (value.integer() != nullptr) return *value.integer();
  if (value.boolean() != nullptr) return *value.boolean() ? 1 : 0;
  return std::nullopt;
}

}  // namespace

Value::Value(const Value& other) = default;
Value::Value(Value&& other) noexcept = default;
Value& Value::operator=(const Value& other) = default;
Value& Value::operator=(Value&& other) noexcept = default;
Value::~Value() = default;

Value Value::Bool(bool value) { return Value(Data(value)); }
Value Value::Int(std::int64_t value) { return Value(Data(value)); }

Value::Value(List list) {
  for (const Value& item : list) depth_ = std::max(depth_, item.depth_);
  ++depth_;
  data_ = std::make_shared<const List>(std::move(list));
}

Value::Value(Dict dict) {
  for (const auto& [key, value] : dict) depth_ = std::max(depth_, value.depth_);
  ++depth_;
  data_ = std::make_shared<const Dict>(std::move(dict));
}

bool Value::Truthy() const {
  if (const auto number = Number(*this)) return *number != 0;
  if (string() != nullptr) return !string()->empty();
  if (list() != nullptr) return !list()->empty();
  if (namespace_attributes() != nullptr) return true;  // an object
  return dict() != nullptr && !dict()->empty();
}

std::string_view Value::KindName() const {
  constexpr std::string_view kNames[] = {"undefined", "none",   "a boolean", "an integer",
                                         "a string",  "a list", "a dict",    "a namespace"};
  return kNames[data_.index()];
}

bool Value::Equal(const Value& a, const Value& b, std::int64_t max_steps, std::int64_t& steps) {
  if (++steps > max_steps) return false;
  if (const auto number = Number(a)) return number == Number(b);
  if (a.data_.index() != b.data_.index()) return false;
  if (a.string() != nullptr) return *a.string() == *b.string();
  if (a.list() != nullptr) {
    return std::equal(
        a.list()->begin(), a.list()->end(), b.list()->begin(), b.list()->end(),
        [&](const Value& x, const Value& y) { return Equal(x, y, max_steps, steps); });
  }
  if (a.namespace_attributes() != nullptr) return a.dict() == b.dict();  // the same object
  if (a.dict() == nullptr) return true;                                  // none, undefined
  return a.dict()->size() == b.dict()->size() &&
         std::all_of(a.dict()->begin(), a.dict()->end(), [&](const auto& entry) {
           const Value* other = Find(*b.dict(), entry.first);
           return other != nullptr && Equal(entry.second, *other, max_steps, steps);
         });
}

const Value* Find(const Dict& dict, std::string_view key) {
  for (const auto& [name, value] : dict) {
    if (name == key) return &value;
  }
  return nullptr;
}

}  // namespace weft::jinja
