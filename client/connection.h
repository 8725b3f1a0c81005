#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/grpc_server.h"
#include "server/options.h"
#include "server/tls_files.h"

namespace weft {

// How a command connects to a router that somebody else runs.
struct ConnectionFlags {
  TlsFiles tls;
  std::string api_key_file;

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // The API key comes from the file, else from the variable WEFT_API_KEY: an argument could be read
  // by everybody on this host. INVALID_ARGUMENT names the flag of a file that cannot be used.
  absl::StatusOr<GrpcChannelOptions> ChannelOptions() const;
};

}  // namespace weft
