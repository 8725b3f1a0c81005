#pragma once

#include <cstdint>

#include "worker/engine/step_plan.h"
#include "worker/model/step_rows.h"

namespace weft {

// Is told where a rank is in a step. Calls come on the rank's executor thread, in this order, and
// hold it up.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // The plan's deltas are in `slots`; nothing of the step has been computed.
  virtual void OnStepBegin(const StepPlan& plan, const SlotTable& slots) = 0;
  // K and V of the step's rows are stored in layer `layer`. Not for plans without rows, and not on
  // devices, where they are stored when the step ends.
  virtual void OnLayerStored(std::int32_t layer) = 0;
  virtual void OnStepEnd() = 0;
};

}  // namespace weft
