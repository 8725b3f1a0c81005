#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft {

// Parses a file's JSON. INVALID_ARGUMENT, with the position, if it is none or is nested deeper than
// kMaxJsonDepth (destroying a document recurses).
absl::StatusOr<nlohmann::json> ParseTextJson(std::string_view text, std::string_view name);

inline constexpr int kMaxJsonDepth = 64;

// A place in a JSON document that knows its path, so that errors can name it.
// The document must outlive it.
class JsonCursor {
 public:
  JsonCursor(const nlohmann::json& document, std::string_view file)
      : value_(&document), path_(file), separator_(": ") {}

  const nlohmann::json& value() const { return *value_; }

  // The member `key`. A missing one is a null, as Hugging Face reads it.
  absl::StatusOr<JsonCursor> Get(std::string_view key) const;
  absl::StatusOr<std::vector<JsonCursor>> Elements() const;
  bool IsNull() const { return value_->is_null(); }

  absl::StatusOr<std::string_view> GetString(std::string_view key) const;
  absl::StatusOr<bool> GetBool(std::string_view key, std::optional<bool> otherwise) const;

  // An integer in 0..limit-1.
  absl::StatusOr<std::int32_t> Integer(std::int32_t limit) const;
  absl::StatusOr<std::string_view> String() const;  // points into the document

  // INVALID_ARGUMENT "FILE: PATH: `what`".
  absl::Status Error(std::string_view what) const;

 private:
  JsonCursor(const nlohmann::json* value, std::string path)
      : value_(value), path_(std::move(path)), separator_(".") {}
  absl::Status WrongType(std::string_view wanted) const;

  const nlohmann::json* value_;
  std::string path_;
  std::string_view separator_;
};

}  // namespace weft
