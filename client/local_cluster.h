#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/supervisor.h"

namespace weft {

// A router and one group of workers on this host, as children of this process.
struct LocalCluster {
  int tensor_parallel_size = 1;
  std::vector<std::string> worker_arguments;  // GroupFlags::Arguments()
  std::vector<std::string> router_arguments;  // RouterFlags::Arguments()
  // Each time the router has started and has a ready group; with the address it listens on.
  std::function<void(const std::string& address)> on_ready;

  // Adds both to `supervisor`, the router last: it stops first, and what is in flight can end. The
  // leader listens on a name of its own that nobody else on this host has.
  void AddTo(Supervisor& supervisor) const;
};

// "unix-abstract:weft-PID-RANDOM-`role`".
std::string UniqueSocketAddress(std::string_view role);

}  // namespace weft
