#include <optional>
#include <string>

#include "client/commands.h"
#include "client/local_cluster.h"
#include "fmt/format.h"
#include "server/base/log.h"
#include "server/group_flags.h"
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
  TerminationSignals signals;
  GroupFlags group;
  RouterFlags router;
  OptionParser parser("weft serve",
                      "Serves a model from this host, until Ctrl-C or SIGTERM: a router and a "
                      "group of ranks. Requests in flight finish first.");
  group.AddTo(parser);
  router.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  InitLog("weft", group.log_level);
  if (const absl::Status status = group.Check(); !status.ok()) {
    fmt::print(stderr, "weft serve: {}\n", std::string(status.message()));
    return kExitConfigError;
  }

  Supervisor supervisor(
      {.stall_timeout = group.stall_timeout, .drain_timeout = router.drain_timeout + kStopMargin});
  supervisor.StopOnSignal(signals.fd());
  LocalCluster cluster = {.tensor_parallel_size = group.tensor_parallel_size,
                          .worker_arguments = GroupFlags::Arguments(parser),
                          .router_arguments = RouterFlags::Arguments(parser)};
  cluster.on_ready = [&group](const std::string& address) {
    spdlog::info("{} is ready on {} ranks at {}", group.ServedModelName(),
                 group.tensor_parallel_size, address);
  };
  cluster.AddTo(supervisor);
  return supervisor.Run();
}

}  // namespace weft
