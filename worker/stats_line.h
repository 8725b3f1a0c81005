#pragma once

#include <optional>
#include <string>

#include "absl/time/time.h"
#include "worker/engine/engine.h"

namespace weft {

// The steady line in the leader's log: what the engine has done since the last one.
class StatsLine {
 public:
  explicit StatsLine(absl::Time now) : last_time_(now) {}

  // Nothing when the engine has had nothing to do since the last call, so that an idle server is
  // silent. `now` is later than the last one.
  std::optional<std::string> Next(const EngineStats& stats, absl::Time now);

 private:
  absl::Time last_time_;
  EngineStats last_;
};

}  // namespace weft
