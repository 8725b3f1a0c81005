#include "router/text/json_cursor.h"

#include <fmt/format.h>

#include "server/base/status_macros.h"

namespace weft {
namespace {

using Json = nlohmann::json;

// Sees the whole document before anything is built from it: finds what is wrong, and where.
class Checker : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(std::size_t) override { return Enter(); }
  bool start_array(std::size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& exception) override {
    error_ = fmt::format("not JSON at byte {}: {}", position, exception.what());
    return false;
  }

  const std::string& error() const { return error_; }

 private:
  bool Enter() {
    if (++depth_ <= kMaxJsonDepth) return true;
    error_ = fmt::format("nested deeper than {} levels", kMaxJsonDepth);
    return false;
  }
  bool Leave() {
    --depth_;
    return true;
  }

  int depth_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> ParseTextJson(std::string_view text, std::string_view name) {
  Checker checker;
  if (!Json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(fmt::format("{}: {}", name, checker.error()));
  }
  return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

absl::StatusOr<JsonCursor> JsonCursor::Get(std::string_view key) const {
  static const Json kNull;
  if (!value_->is_object()) return WrongType("an object");
  const auto found = value_->find(key);
  return JsonCursor(found == value_->end() ? &kNull : &*found,
                    fmt::format("{}{}{}", path_, separator_, key));
}

absl::StatusOr<std::vector<JsonCursor>> JsonCursor::Elements() const {
  if (!value_->is_array()) return WrongType("an array");
  std::vector<JsonCursor> elements;
  for (std::size_t i = 0; i < value_->size(); ++i) {
    elements.push_back(JsonCursor(&(*value_)[i], fmt::format("{}[{}]", path_, i)));
  }
  return elements;
}

absl::StatusOr<std::string_view> JsonCursor::GetString(std::string_view key) const {
  ASSIGN_OR_RETURN(const JsonCursor member, Get(key));
  return member.String();
}

absl::StatusOr<bool> JsonCursor::GetBool(std::string_view key,
                                         std::optional<bool> otherwise) const {
  ASSIGN_OR_RETURN(const JsonCursor member, Get(key));
  if (member.IsNull() && otherwise) return *otherwise;
  if (!member.value().is_boolean()) return member.WrongType("true or false");
  return member.value().get<bool>();
}

absl::StatusOr<std::int32_t> JsonCursor::Integer(std::int32_t limit) const {
  if (!value_->is_number_unsigned()) return WrongType("an integer from 0 on");
  const auto number = value_->get<std::uint64_t>();
  if (number >= static_cast<std::uint64_t>(limit)) {
    return Error(fmt::format("is {}; it must be under {}", number, limit));
  }
  return static_cast<std::int32_t>(number);
}

absl::StatusOr<std::string_view> JsonCursor::String() const {
  if (!value_->is_string()) return WrongType("a string");
  return std::string_view(value_->get_ref<const std::string&>());
}

absl::Status JsonCursor::WrongType(std::string_view wanted) const {
  return Error(fmt::format("is {}; it must be {}", value_->type_name(), wanted));
}

absl::Status JsonCursor::Error(std::string_view what) const {
  return absl::InvalidArgumentError(
      fmt::format("{}{}{}", path_, separator_ == "." ? " " : separator_, what));
}

}  // namespace weft
