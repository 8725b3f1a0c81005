#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "router/text/jinja_ast.h"
#include "router/text/jinja_value.h"

namespace weft::jinja {

// What one rendering may cost.
struct RenderLimits {
  std::int64_t max_steps = 10'000'000;               // statements run and expressions evaluated
  std::int64_t max_bytes = std::int64_t{256} << 20;  // of all texts it makes on its way
};

// A parsed template. Immutable: any thread may render it at any time.
class Template {
 public:
  static absl::StatusOr<Template> Parse(std::string_view source);

  // INVALID_ARGUMENT, naming the line, when the template raises an exception or uses a filter,
  // test, method or operation that is not supported; RESOURCE_EXHAUSTED beyond the limits.
  absl::StatusOr<std::string> Render(const Dict& variables, const RenderLimits& limits = {}) const;

 private:
  explicit Template(std::vector<Node> nodes) : nodes_(std::move(nodes)) {}

  std::vector<Node> nodes_;
};

}  // namespace weft::jinja
