#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "router/cluster_snapshot.h"
#include "router/recent_errors.h"

namespace weft {

// What /statusz shows.
struct RouterStatus {
  std::string version;
  std::string model;
  absl::Time now;
  absl::Duration uptime;
  std::int64_t requests_in_flight = 0;
  std::int64_t requests_waiting = 0;  // for a group
  ClusterSnapshot cluster;
  std::vector<RecentErrors::Entry> errors;  // the newest first
};

// A page for people, whole in itself: groups, their layout, KV in use as bars, recent errors. Loads
// itself again every 5 s. Whatever is text is escaped.
std::string StatusPage(const RouterStatus& status);

}  // namespace weft
