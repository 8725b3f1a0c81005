#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/local_cluster.h"
#include "server/group_flags.h"
#include "server/options.h"

namespace weft {

// Where a command that sends requests finds a server, or that it starts one for itself.
struct ServerFlags {
  std::optional<std::string> address;
  bool skip_tokenizer_init = false;
  PrefillFlags prefill;

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);
};

// After parser.Parse(). INVALID_ARGUMENT when flags on the command line would be ignored: those of
// a group of ranks together with --address. Without that, also what no group can be, and
// FAILED_PRECONDITION when this process may not open as many files as one needs.
absl::Status CheckServerFlags(const ServerFlags& server, const GroupFlags& group,
                              const OptionParser& parser);

// Sends the command's requests to the router at `address` until `cancelled`, when that is gone and
// errors say nothing. Returns the exit code.
using ClientFunction =
    std::function<int(const std::string& address, const std::atomic<bool>& cancelled)>;

// Runs `client` against server.address, or against a router and ranks that are started for it and
// stopped after it. Returns the program's exit code.
int RunClient(const ServerFlags& server, const GroupFlags& group, const OptionParser& parser,
              const ClientFunction& client);

}  // namespace weft
