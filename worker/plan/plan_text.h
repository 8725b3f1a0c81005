#pragma once

#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "worker/plan/layout_plan.h"

namespace weft {

// A table for people, with `recommendation` under it.
std::string PlanText(absl::Span<const LayoutPlan> plans, std::string_view recommendation);

// A list of objects, one a layout and context, keys as in LayoutPlan; what is not known is left
// out. Ends with a newline.
std::string PlanJson(absl::Span<const LayoutPlan> plans);

}  // namespace weft
