#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/options.h"
#include "server/supervisor.h"

namespace weft {

// A second group that computes the prompts for the first, if --prefill-tensor-parallel-size asks
// for one.
struct PrefillFlags {
  std::optional<std::int32_t> tensor_parallel_size;
  std::int32_t decode_context_parallel_size = 1;
  std::optional<std::int32_t> interleave;

  // `this` must outlive `parser`.
  void AddTo(OptionParser& parser);
  // INVALID_ARGUMENT for what no group can be, and for flags without the first.
  absl::Status Check(const OptionParser& parser) const;
};

// A router and one group of workers on this host, or one and another for prefill, as children of
// this process.
struct LocalCluster {
  int tensor_parallel_size = 1;
  std::vector<std::string> worker_arguments;  // GroupFlags::Arguments()
  std::vector<std::string> router_arguments;  // RouterFlags::Arguments()
  PrefillFlags prefill;
  // Each time the router has started and has a ready group; with the address it listens on.
  std::function<void(const std::string& address)> on_ready;

  // Adds both to `supervisor`, the router last: it stops first, and what is in flight can end. The
  // leader listens on a name of its own that nobody else on this host has.
  void AddTo(Supervisor& supervisor) const;
};

// "unix-abstract:weft-PID-RANDOM-`role`".
std::string UniqueSocketAddress(std::string_view role);

}  // namespace weft
