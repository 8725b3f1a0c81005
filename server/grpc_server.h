#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/tls_files.h"

// Forward: grpcpp headers are slow to compile.
namespace grpc {
class Channel;
class ChannelCredentials;
class Server;
class ServerCredentials;
class Service;
}  // namespace grpc

namespace weft {

// Both ends of a connection use the same.
struct GrpcTransportOptions {
  std::int64_t max_message_bytes = std::int64_t{64} << 20;  // either way
  absl::Duration keepalive_interval = absl::Seconds(30);    // pings also without calls
  absl::Duration keepalive_timeout = absl::Seconds(10);  // an unanswered ping ends the connection
};

struct GrpcServerOptions {
  // "host:port" (port 0 picks a free one) or "unix-abstract:NAME"; at least one.
  std::vector<std::string> listen_addresses;
  TlsFiles tls;  // of host:port addresses; a unix-abstract one does not leave this host
  GrpcTransportOptions transport;
  absl::Duration min_ping_interval = absl::Seconds(10);  // clients that ping faster are cut off
  // A connection older than this is asked to go; its calls have the grace to end. Balances load
  // over servers that came later.
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_age_grace = absl::InfiniteDuration();
  std::int32_t max_concurrent_streams = 0;  // calls of one connection at a time; 0: any number
  std::int64_t memory_quota_bytes = 0;      // of gRPC's own buffers; 0: any
};

struct GrpcChannelOptions {
  GrpcTransportOptions transport;
  // Of NewClientCredentials(). Null, or a unix-abstract address: no TLS.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string bearer_token;  // goes with each call; empty: none
  // gRPC sends a call again that its server never saw, as when it closes an old connection. With
  // gRPC 1.51 one that is cancelled meanwhile, its server being gone, may never end
  // (router_storm_test): not for who cancels calls, waits for their ends and sends again itself.
  bool retries = true;
};

// A running gRPC server with reflection and grpc.health.v1, where the service "" is liveness and
// answers SERVING from the start until Shutdown(); others are unknown until SetServing().
//
// Thread-safe.
class GrpcServer {
 public:
  // Listens and serves `services`, which outlive the server. UNAVAILABLE when an address cannot be
  // listened on, because it is in use (ports are never shared) or not ours; INVALID_ARGUMENT when
  // it does not parse, and for files of TLS that cannot be used.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options, absl::Span<grpc::Service* const> services);
  // As Shutdown(absl::ZeroDuration()).
  ~GrpcServer();

  // As given, with the port that was picked; in the order of listen_addresses.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // What health checks of `service` ("weft.v1.Inference") answer.
  void SetServing(std::string_view service, bool serving);

  // No connection takes or gives anything more, and none is accepted: calls that run or arrive end
  // with UNAVAILABLE at their clients, which first read what has been written. Do this before
  // Shutdown() where no call may seem cancelled: to one that arrives later gRPC says CANCELLED.
  void Disconnect();

  // All health checks answer NOT_SERVING, no new call is accepted, running ones have `deadline`
  // to end and are cancelled then. Returns when the last one is over. Idempotent.
  void Shutdown(absl::Duration deadline);

 private:
  GrpcServer();

  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<grpc::ServerCredentials>> credentials_;  // which gRPC does not hold
  std::unique_ptr<grpc::Server> server_;
};

// A channel to such a server. Connects again within about a second when the server is back; ignores
// http_proxy.
std::shared_ptr<grpc::Channel> NewGrpcChannel(const std::string& address,
                                              const GrpcChannelOptions& options = {});

// Sends the log lines of gRPC and protobuf to ours, at debug level. Call once, after InitLog().
void InitGrpcLog();

}  // namespace weft
