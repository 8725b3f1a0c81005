#include "client/connection.h"

#include <cstdlib>

#include "server/base/status_macros.h"
#include "server/secret.h"
#include "server/tls.h"

namespace weft {

void ConnectionFlags::AddTo(OptionParser& parser) {
  parser.Group("Connection");
  tls.AddTo(parser, "--", "Certificate that the router sees, if it asks for one: a PEM file",
            "Connect by TLS, to a router with a certificate of one of the CAs in this PEM file "
            "that names its host");
  parser.Add("--api-key-file", &api_key_file,
             "File with the API key that the router wants; else the variable WEFT_API_KEY");
}

absl::StatusOr<GrpcChannelOptions> ConnectionFlags::ChannelOptions() const {
  GrpcChannelOptions options;
  ASSIGN_OR_RETURN(options.credentials, NewClientCredentials(tls));
  if (!api_key_file.empty()) {
    ASSIGN_OR_RETURN(options.bearer_token, ReadSecretFile("--api-key-file", api_key_file));
  } else if (const char* key = std::getenv("WEFT_API_KEY"); key != nullptr && *key != '\0') {
    if (!IsSecret(key)) {
      return absl::InvalidArgumentError("WEFT_API_KEY has other than visible ASCII characters");
    }
    options.bearer_token = key;
  }
  return options;
}

}  // namespace weft
