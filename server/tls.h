#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/tls_files.h"

// Forward: grpcpp headers are slow to compile.
namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace weft {

// What a server shows and asks for: a certificate with its key and, with ca_certs, a certificate of
// each client. No files: a server without TLS.
//
// Files are looked at again with each new connection; files that cannot be used are logged, once,
// and what was read before stays. Connections that are open keep what they began with. Of one
// address; outlive the server.
//
// INVALID_ARGUMENT names the flag and file that is missing, cannot be read, or does not fit.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(
    const TlsFiles& files);

// What a client asks for and shows: a server whose certificate is of ca_certs and names the host
// that was dialled and, with certfile, its own certificate. No files: a client without TLS, null.
//
// New files are taken within a second, for new connections. Errors as above.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewClientCredentials(
    const TlsFiles& files);

}  // namespace weft
