#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace weft {

// Parses a file that anybody may have made: iteratively, at most 32 levels deep, valid UTF-8 and no
// key twice in an object. INVALID_ARGUMENT starts with `where`.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, std::string_view where);

// The same of a file of at most `max_bytes` that holds an object. NOT_FOUND when there is no such
// file.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::filesystem::path& path,
                                              std::int64_t max_bytes);

// `value` as JSON, cut to a length fit for a message.
std::string Abbreviate(const nlohmann::json& value);

// Typed, range-checked look-ups in a JSON object. The first error sticks: read all the keys, then
// look at status(); what is read after an error means nothing. A key that is null counts as absent.
// Looks at `object`, which must outlive it.
class JsonFields {
 public:
  // `where` starts every message: the file, and the key of the object in it.
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  bool Has(const std::string& key) const;
  // Whether the key is there and null, for the few keys where that is not the same as absent.
  bool IsNull(const std::string& key) const;
  // The value of a key that Has().
  const nlohmann::json& Raw(const std::string& key) const { return object_.at(key); }

  // Without a `fallback` the key is required.
  std::int64_t Int(const std::string& key, std::int64_t min, std::int64_t max,
                   std::optional<std::int64_t> fallback = std::nullopt);
  // A finite number in [min, max].
  double Real(const std::string& key, double min, double max,
              std::optional<double> fallback = std::nullopt);
  bool Bool(const std::string& key, bool fallback);
  std::string String(const std::string& key, std::string_view fallback);

  // Sets the error "<where>: <key> is <value>; <allowed>" ("<key> is missing; ..."), unless there
  // is one.
  void Fail(const std::string& key, std::string_view allowed);
  const std::string& where() const { return where_; }
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  std::string where_;
  absl::Status status_;
};

}  // namespace weft
