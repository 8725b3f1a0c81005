#include <optional>
#include <string>
#include <utility>

#include "client/commands.h"
#include "client/local_cluster.h"
#include "fmt/format.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/file_limit.h"
#include "server/group_flags.h"
#include "server/metrics_server.h"
#include "server/options.h"
#include "server/router_flags.h"
#include "server/signals.h"
#include "server/supervisor.h"

namespace weft {
namespace {

// What a child gets beyond its own timeout before it is killed.
constexpr absl::Duration kStopMargin = absl::Seconds(5);

}  // namespace

int ServeCommand(int argc, char** argv) {
  GroupFlags group;
  RouterFlags router;
  MetricsFlags metrics;
  PrefillFlags prefill;
  OptionParser parser("weft serve",
                      "Serves a model from this host, until Ctrl-C or SIGTERM: a router and a "
                      "group of ranks. Requests in flight finish first.");
  group.AddTo(parser);
  prefill.AddTo(parser);
  router.AddTo(parser);
  metrics.AddTo(parser, "9400, the router's; ranks take free ones, which weft status shows");
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  TerminationSignals signals;
  InitLog("weft", group.log_level);
  absl::Status status = group.Check();
  if (status.ok()) status = prefill.Check(parser);
  if (status.ok()) status = RaiseFileLimit(kMinServerFiles);
  if (!status.ok()) {
    PrintErr("weft serve: {}\n", std::string(status.message()));
    return kExitConfigError;
  }

  Supervisor supervisor({.stall_timeout = group.stall_timeout,
                         .drain_timeout = router.drain_timeout + kStopMargin,
                         .min_backoff = group.min_restart_backoff,
                         .max_backoff = group.max_restart_backoff});
  supervisor.StopOnSignal(signals.fd());
  LocalCluster cluster = {.tensor_parallel_size = group.tensor_parallel_size,
                          .worker_arguments = GroupFlags::Arguments(parser),
                          .router_arguments = RouterFlags::Arguments(parser),
                          .prefill = prefill};
  for (std::string& argument : MetricsFlags::Arguments(parser)) {
    cluster.router_arguments.push_back(std::move(argument));
  }
  cluster.worker_arguments.push_back("--metrics-host=" + metrics.metrics_host);
  if (metrics.metrics_port == -1) cluster.worker_arguments.push_back("--metrics-port=-1");
  cluster.on_ready = [&group](const std::string& address) {
    spdlog::info("{} is ready on {} ranks at {}", group.ServedModelName(),
                 group.tensor_parallel_size, address);
  };
  cluster.AddTo(supervisor);
  return supervisor.Run();
}

}  // namespace weft
