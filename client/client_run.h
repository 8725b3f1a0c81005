#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/local_cluster.h"
#include "server/group_flags.h"
#include "server/options.h"

namespace weft {

// Where a command that sends requests finds a server, or that it starts one for itself.
struct ServerFlags {
  std::optional<std::string> address;
  ConnectionFlags connection;
  bool skip_tokenizer_init = false;
  PrefillFlags prefill;

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);
};

// After parser.Parse(): how to connect. INVALID_ARGUMENT for files that cannot be used, and when
// flags on the command line would be ignored: those of a group of ranks together with --address,
// those of TLS without it. Without --address, also for what no group can be, and
// FAILED_PRECONDITION when this process may not open as many files as one needs.
absl::StatusOr<GrpcChannelOptions> CheckServerFlags(const ServerFlags& server,
                                                    const GroupFlags& group,
                                                    const OptionParser& parser);

// Sends the command's requests to the router over `channel` until `cancelled`, when that is gone
// and errors say nothing. Returns the exit code.
using ClientFunction = std::function<int(const std::shared_ptr<grpc::Channel>& channel,
                                         const std::atomic<bool>& cancelled)>;

// Runs `client` against server.address, or against a router and ranks that are started for it and
// stopped after it. Returns the program's exit code.
int RunClient(const ServerFlags& server, const GroupFlags& group, const OptionParser& parser,
              const GrpcChannelOptions& channel_options, const ClientFunction& client);

}  // namespace weft
