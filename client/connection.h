#pragma once

#include "absl/status/statusor.h"
#include "server/grpc_server.h"
#include "server/options.h"
#include "server/tls_files.h"

namespace weft {

// How a command connects to a router that somebody else runs.
struct ConnectionFlags {
  TlsFiles tls;

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // INVALID_ARGUMENT names the flag of a file that cannot be used.
  absl::StatusOr<GrpcChannelOptions> ChannelOptions() const;
};

}  // namespace weft
