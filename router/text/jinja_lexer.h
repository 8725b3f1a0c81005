#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft::jinja {

struct Token {
  enum class Kind {
    kText,  // outside of tags, whitespace control applied
    kOutputBegin,
    kOutputEnd,
    kBlockBegin,
    kBlockEnd,
    kName,
    kString,  // unescaped
    kInt,
    kOperator,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  int line = 0;
  std::string text;
  std::int64_t number = 0;
};

absl::Status Error(int line, std::string_view what);

// A template's tokens; the last one is kEnd.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace weft::jinja
