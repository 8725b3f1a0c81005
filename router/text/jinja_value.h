#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace weft::jinja {

class Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;  // few keys, in order

// What an expression has for a value. Cheap to copy: texts, lists and dicts are shared and never
// change, but for a namespace, whose attributes are set.
class Value {
 public:
  struct Undefined {
    std::string name;  // for messages
  };
  struct None {};
  struct Namespace {
    std::shared_ptr<Dict> attributes;
  };

  Value() : data_(None{}) {}
  // Out of line: gcc 12 sees uninitialized members where it inlines them.
  Value(const Value& other);
  Value(Value&& other) noexcept;
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();
  Value(Undefined undefined) : data_(std::move(undefined)) {}  // NOLINT: a value like the others
  Value(std::string text)                                      // NOLINT
      : data_(std::make_shared<const std::string>(std::move(text))) {}
  Value(List list);                                    // NOLINT
  Value(Dict dict);                                    // NOLINT
  Value(Namespace space) : data_(std::move(space)) {}  // NOLINT
  static Value Bool(bool value);
  static Value Int(std::int64_t value);

  bool is_undefined() const { return std::holds_alternative<Undefined>(data_); }
  bool is_none() const { return std::holds_alternative<None>(data_); }
  // Null when it is another kind.
  const bool* boolean() const { return std::get_if<bool>(&data_); }
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&data_); }
  const std::string* string() const {
    const auto* text = std::get_if<std::shared_ptr<const std::string>>(&data_);
    return text == nullptr ? nullptr : text->get();
  }
  const List* list() const {
    const auto* list = std::get_if<std::shared_ptr<const List>>(&data_);
    return list == nullptr ? nullptr : list->get();
  }
  const Dict* dict() const {  // also a namespace's
    if (const auto* space = std::get_if<Namespace>(&data_)) return space->attributes.get();
    const auto* dict = std::get_if<std::shared_ptr<const Dict>>(&data_);
    return dict == nullptr ? nullptr : dict->get();
  }
  Dict* namespace_attributes() const {
    const auto* space = std::get_if<Namespace>(&data_);
    return space == nullptr ? nullptr : space->attributes.get();
  }
  const std::string& undefined_name() const { return std::get<Undefined>(data_).name; }

  // How deep lists and dicts are nested in it; what recurses over values relies on a bound.
  int depth() const { return depth_; }
  bool Truthy() const;
  std::string_view KindName() const;  // "a string"
  // As Python's ==; true and 1 are equal. Adds the comparisons made to `steps`, and gives up, with
  // false, beyond `max_steps`.
  static bool Equal(const Value& a, const Value& b, std::int64_t max_steps, std::int64_t& steps);

 private:
  using Data = std::variant<Undefined, None, bool, std::int64_t, std::shared_ptr<const std::string>,
                            std::shared_ptr<const List>, std::shared_ptr<const Dict>, Namespace>;
  explicit Value(Data data) : data_(std::move(data)) {}

  Data data_;
  int depth_ = 0;
};

// Null when there is no such key.
const Value* Find(const Dict& dict, std::string_view key);

}  // namespace weft::jinja
