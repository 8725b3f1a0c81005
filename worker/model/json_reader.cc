#include "worker/model/json_reader.h"

#include <cmath>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDepth = 32;
constexpr std::size_t kMaxMessageValue = 80;

// The first `size` bytes of valid UTF-8, less a character that would be cut.
std::string_view Utf8Prefix(std::string_view text, std::size_t size) {
  if (text.size() <= size) return text;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// Builds the value from parse events, which json::parse() would do as well, but without limits.
class JsonBuilder : public nlohmann::json_sax<json> {
 public:
  json Take() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Stop("binary value"); }
  bool start_object(std::size_t) override { return Open(json::object()); }
  bool start_array(std::size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& value) override {
    if (open_.back()->contains(value)) {
      return Stop(fmt::format("key \"{}\" appears twice", Utf8Prefix(value, kMaxMessageValue)));
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ...; last read: <raw
    // bytes>", which need not be UTF-8.
    std::string_view what = error.what();
    if (const auto tag = what.find("] "); tag != what.npos) what.remove_prefix(tag + 2);
    return Stop(std::string(what.substr(0, what.find("; last read"))));
  }

 private:
  bool Stop(std::string error) {
    error_ = std::move(error);
    return false;
  }

  json* Place(json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_object()) return &(open_.back()->operator[](key_) = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }

  bool Add(json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(json value) {
    if (open_.size() == kMaxDepth)
      return Stop(fmt::format("nested over {} levels deep", kMaxDepth));
    open_.push_back(Place(std::move(value)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json root_;
  std::vector<json*> open_;  // the containers around the current place; a parent is not changed
                             // while a child is open, so the pointers stay good
  std::string key_;
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJson(std::string_view text, std::string_view where) {
  JsonBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(
        fmt::format("{} is not valid JSON: {}", where, builder.error()));
  }
  return builder.Take();
}

absl::StatusOr<json> ReadJsonObject(const std::filesystem::path& path, std::int64_t max_bytes) {
  const std::string where = path.string();
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(fmt::format("{}: no such file", where));
  }
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size > static_cast<std::uintmax_t>(max_bytes)) {
    return absl::InvalidArgumentError(
        fmt::format("{} has {} bytes; at most {} are read", where, size, max_bytes));
  }
  std::string text(error ? 0 : size, '\0');
  std::ifstream in(path, std::ios::binary);
  if (error || !in.read(text.data(), static_cast<std::streamsize>(size))) {
    return absl::InvalidArgumentError(fmt::format("{}: cannot be read", where));
  }
  ASSIGN_OR_RETURN(json value, ParseJson(text, where));
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        fmt::format("{} holds {}; it must hold an object", where, Abbreviate(value)));
  }
  return value;
}

std::string Abbreviate(const json& value) {
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() <= kMaxMessageValue) return text;
  return fmt::format("{}...", Utf8Prefix(text, kMaxMessageValue));
}

bool JsonFields::Has(const std::string& key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

bool JsonFields::IsNull(const std::string& key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

void JsonFields::Fail(const std::string& key, std::string_view allowed) {
  if (!status_.ok()) return;
  const auto found = object_.find(key);
  const std::string seen = found == object_.end() ? "missing" : Abbreviate(*found);
  status_ = absl::InvalidArgumentError(fmt::format("{}: {} is {}; {}", where_, key, seen, allowed));
}

std::int64_t JsonFields::Int(const std::string& key, std::int64_t min, std::int64_t max,
                             std::optional<std::int64_t> fallback) {
  if (!Has(key) && fallback) return *fallback;
  if (Has(key)) {
    const json& value = Raw(key);
    // Above the signed range it is out of any range here.
    const bool fits = value.is_number_integer() &&
                      !(value.is_number_unsigned() &&
                        value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX));
    if (fits && min <= value.get<std::int64_t>() && value.get<std::int64_t>() <= max) {
      return value.get<std::int64_t>();
    }
  }
  Fail(key, fmt::format("it must be an integer in [{}, {}]", min, max));
  return min;
}

double JsonFields::Real(const std::string& key, double min, double max,
                        std::optional<double> fallback) {
  if (!Has(key) && fallback) return *fallback;
  if (Has(key) && Raw(key).is_number()) {
    const double value = Raw(key).get<double>();
    if (std::isfinite(value) && min <= value && value <= max) return value;
  }
  Fail(key, fmt::format("it must be a number in [{}, {}]", min, max));
  return min;
}

bool JsonFields::Bool(const std::string& key, bool fallback) {
  if (!Has(key)) return fallback;
  if (Raw(key).is_boolean()) return Raw(key).get<bool>();
  Fail(key, "it must be true or false");
  return fallback;
}

std::string JsonFields::String(const std::string& key, std::string_view fallback) {
  if (!Has(key)) return std::string(fallback);
  if (Raw(key).is_string()) return Raw(key).get<std::string>();
  Fail(key, "it must be a string");
  return std::string(fallback);
}

}  // namespace weft
