#include "client/local_cluster.h"

#include <unistd.h>

#include <random>
#include <utility>

#include "fmt/format.h"

namespace weft {
namespace {

std::vector<std::string> Command(std::string_view program, std::vector<std::string> first,
                                 const std::vector<std::string>& more) {
  std::vector<std::string> command = {SiblingProgram(program)};
  command.insert(command.end(), std::make_move_iterator(first.begin()),
                 std::make_move_iterator(first.end()));
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

}  // namespace

void LocalCluster::AddTo(Supervisor& supervisor) const {
  const std::string leader = UniqueSocketAddress("leader");
  const std::vector<std::string> worker = Command(
      "weft-worker", {fmt::format("--local-ranks={}", tensor_parallel_size), "--listen=" + leader},
      worker_arguments);
  const std::vector<std::string> router =
      Command("weft-router", {"--groups=" + leader}, router_arguments);

  GroupSpec workers = {.name = "workers", .members = {{.name = "weft-worker"}}};
  workers.members[0].command = [worker](absl::Span<const ReadyFields>) { return worker; };
  supervisor.AddGroup(std::move(workers));

  GroupSpec routers = {.name = "router", .members = {{.name = "weft-router"}}};
  routers.members[0].command = [router](absl::Span<const ReadyFields>) { return router; };
  routers.on_ready = [done = on_ready](absl::Span<const ReadyFields> ready) {
    done(ready[0].at("address"));
  };
  supervisor.AddGroup(std::move(routers));
}

std::string UniqueSocketAddress(std::string_view role) {
  std::random_device random;
  return fmt::format("unix-abstract:weft-{}-{:08x}{:08x}-{}", getpid(), random(), random(), role);
}

}  // namespace weft
