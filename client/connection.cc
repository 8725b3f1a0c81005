#include "client/connection.h"

#include "server/base/status_macros.h"
#include "server/tls.h"

namespace weft {

void ConnectionFlags::AddTo(OptionParser& parser) {
  parser.Group("Connection");
  tls.AddTo(parser, "--", "Certificate that the router sees, if it asks for one: a PEM file",
            "Connect by TLS, to a router with a certificate of one of the CAs in this PEM file "
            "that names its host");
}

absl::StatusOr<GrpcChannelOptions> ConnectionFlags::ChannelOptions() const {
  GrpcChannelOptions options;
  ASSIGN_OR_RETURN(options.credentials, NewClientCredentials(tls));
  return options;
}

}  // namespace weft
