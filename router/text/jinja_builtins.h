#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/text/jinja_value.h"

// What templates can call. Errors are INVALID_ARGUMENT without a line, which the caller adds.
namespace weft::jinja {

struct Arguments {
  std::vector<Value> values;
  Dict keywords;
};

// raise_exception, range, namespace, strftime_now.
bool IsFunction(std::string_view name);
absl::StatusOr<Value> CallFunction(std::string_view name, const Arguments& arguments);
absl::StatusOr<Value> CallMethod(const Value& object, std::string_view name,
                                 const Arguments& arguments);
absl::StatusOr<Value> ApplyFilter(std::string_view name, const Value& value,
                                  const Arguments& arguments);
absl::StatusOr<bool> ApplyTest(std::string_view name, const Value& value);

}  // namespace weft::jinja
