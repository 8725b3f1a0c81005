#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/group_flags.h"
#include "server/metrics_server.h"
#include "server/signals.h"
#include "server/supervisor_link.h"
#include "server/tls_files.h"

namespace weft {

// A rank lost its group: another rank died, stalled, or disagreed. The supervisor starts all again.
inline constexpr int kExitGroupLost = 70;

struct RankProcessOptions {
  GroupFlags group;
  WorkerLimits request_limits;
  std::int32_t rank = 0;
  std::int32_t local_ranks = 1;                     // that share this host's cores and memory
  std::vector<std::string> listen;                  // leader: where routers and followers reach it
  std::string leader_address;                       // followers
  std::string join_secret_file;                     // empty: any rank joins
  TlsFiles tls;                                     // of the leader's server, or to reach it
  absl::Duration join_timeout = absl::Minutes(30);  // for all ranks to have loaded
  absl::Duration drain_timeout = absl::Seconds(30);
  MetricsFlags metrics;
};

// What can be wrong with the model or the layout, found before any rank is started.
absl::Status CheckModel(const GroupFlags& flags);

// The life of one rank, from loading to SIGTERM; returns the process's exit code. Rank 0 is the
// leader. What is wrong with flags or files is one line on standard error and kExitConfigError;
// the loss of the group is kExitGroupLost.
int RunRankProcess(const RankProcessOptions& options, TerminationSignals& signals,
                   SupervisorLink& link);

}  // namespace weft
