#include "server/grpc_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "fmt/format.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/grpc.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/support/client_interceptor.h"
#include "server/base/log.h"
#include "server/base/mutex.h"
#include "server/base/status_macros.h"
#include "server/grpc_address.h"
#include "server/tls.h"

namespace weft {
namespace {

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(
      std::clamp<std::int64_t>(absl::ToInt64Milliseconds(duration), 1, INT_MAX));
}

int MessageBytes(const GrpcTransportOptions& options) {
  return static_cast<int>(std::min<std::int64_t>(options.max_message_bytes, INT_MAX));
}

void SetLimits(const GrpcServerOptions& options, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(MessageBytes(options.transport));
  builder.SetMaxSendMessageSize(MessageBytes(options.transport));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                             Milliseconds(options.transport.keepalive_interval));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             Milliseconds(options.transport.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(options.min_ping_interval));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                             Milliseconds(options.max_connection_age));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                             Milliseconds(options.max_connection_age_grace));
  if (options.max_concurrent_streams > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  }
  if (options.memory_quota_bytes > 0) {
    builder.SetResourceQuota(
        grpc::ResourceQuota("weft").Resize(static_cast<std::size_t>(options.memory_quota_bytes)));
  }
}

// Why gRPC could not bind: it tells only its log.
std::string BindError(const std::string& address) {
  if (address.starts_with(kUnixAbstract)) return "the name is in use";
  const std::size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found)) {
    return gai_strerror(error);
  }
  std::string reason = "the address is in use";
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) {
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, found->ai_addr, found->ai_addrlen) != 0) reason = std::strerror(errno);
    close(fd);
  }
  freeaddrinfo(found);
  return reason;
}

// Whether a socket with this name was bound to `address`, or accepted there.
bool IsOf(const sockaddr_storage& name, socklen_t size, std::string_view address) {
  if (address.starts_with(kUnixAbstract)) {
    const auto& local = reinterpret_cast<const sockaddr_un&>(name);
    constexpr std::size_t kPath = offsetof(sockaddr_un, sun_path);
    return name.ss_family == AF_UNIX && size > kPath && local.sun_path[0] == '\0' &&
           std::string_view(local.sun_path + 1, size - kPath - 1) ==
               address.substr(kUnixAbstract.size());
  }
  if (name.ss_family != AF_INET && name.ss_family != AF_INET6) return false;
  const in_port_t port = reinterpret_cast<const sockaddr_in&>(name).sin_port;  // in6's place, too
  return std::to_string(ntohs(port)) == address.substr(address.rfind(':') + 1);
}

// The sockets that listen on these addresses, or those that were accepted there. gRPC does not
// tell.
std::vector<int> SocketsOf(const std::vector<std::string>& addresses, bool listening) {
  std::vector<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::stoi(entry.path().filename());
    int accepts = 0;
    socklen_t size = sizeof(accepts);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0) continue;
    if ((accepts != 0) != listening) continue;
    sockaddr_storage name = {};
    size = sizeof(name);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) continue;
    if (std::any_of(addresses.begin(), addresses.end(),
                    [&](const std::string& address) { return IsOf(name, size, address); })) {
      found.push_back(fd);
    }
  }
  return found;
}

// Keeps gRPC up until the process ends. The last object's grpc_shutdown() joins a thread that may
// be in epoll_wait() for 10 seconds (seen in one of ten ends of a server of the callback API).
void KeepGrpcUp() {
  [[maybe_unused]] static const bool up = [] {
    grpc_init();
    return true;
  }();
}

void LogToSpdlog(gpr_log_func_args* args) {
  const char* slash = std::strrchr(args->file, '/');
  spdlog::debug("grpc: {}:{}: {}", slash == nullptr ? args->file : slash + 1, args->line,
                args->message);
}

void LogProtobufToSpdlog(google::protobuf::LogLevel /*level*/, const char* file, int line,
                         const std::string& message) {
  spdlog::debug("protobuf: {}:{}: {}", file, line, message);
}

// gRPC 1.51 frees a channel's completion queue where the last reference goes; on one of its own
// callback threads that is the queue the thread runs on, and the heap is corrupted. A process makes
// a channel per group, so none is ever let go.
void KeepChannel(std::shared_ptr<grpc::Channel> channel) {
  static Mutex& mutex = *new Mutex;
  static auto& kept = *new std::vector<std::shared_ptr<grpc::Channel>>;
  MutexLock lock(mutex);
  kept.push_back(std::move(channel));
}

// Adds the token to each call: call credentials do that as well, but only over TLS.
class TokenInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit TokenInterceptor(const std::string& authorization) : authorization_(authorization) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", authorization_);
    }
    methods->Proceed();
  }

 private:
  const std::string& authorization_;
};

class TokenInterceptorFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenInterceptorFactory(std::string_view token)
      : authorization_(fmt::format("Bearer {}", token)) {}

  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenInterceptor(authorization_);
  }

 private:
  const std::string authorization_;
};

}  // namespace

GrpcServer::GrpcServer() = default;

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options, absl::Span<grpc::Service* const> services) {
  if (options.listen_addresses.empty()) {
    return absl::InvalidArgumentError("a server needs an address to listen on");
  }
  KeepGrpcUp();
  // Both are read when a builder is made.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  // Reflection describes the health service with it; gRPC's own has no descriptor.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  grpc::ServerBuilder builder;
  std::vector<int> ports(options.listen_addresses.size(), 0);
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const std::string& address = options.listen_addresses[i];
    RETURN_IF_ERROR(CheckGrpcAddress(address, 0));
    const bool local = address.starts_with(kUnixAbstract);
    ASSIGN_OR_RETURN(std::shared_ptr<grpc::ServerCredentials> credentials,
                     NewServerCredentials(local ? TlsFiles() : options.tls));
    builder.AddListeningPort(address, credentials, &ports[i]);
    server->credentials_.push_back(std::move(credentials));
  }
  for (grpc::Service* service : services) builder.RegisterService(service);
  SetLimits(options, builder);
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) {
    const auto failed = std::find_if(ports.begin(), ports.end(), [](int p) { return p <= 0; });
    const std::string& address =
        options.listen_addresses[failed == ports.end() ? 0 : failed - ports.begin()];
    return absl::UnavailableError(
        fmt::format("cannot listen on {}: {}", address, BindError(address)));
  }
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const std::string& address = options.listen_addresses[i];
    server->addresses_.push_back(
        address.starts_with(kUnixAbstract)
            ? address
            : fmt::format("{}:{}", address.substr(0, address.rfind(':')), ports[i]));
  }
  return server;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(std::string_view service, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(std::string(service), serving);
}

void GrpcServer::Disconnect() {
  for (const int fd : SocketsOf(addresses_, /*listening=*/true)) shutdown(fd, SHUT_RDWR);
  // Our half: without the other one the kernel resets the connection of a client that writes, which
  // may not have read all yet.
  for (const int fd : SocketsOf(addresses_, /*listening=*/false)) shutdown(fd, SHUT_WR);
}

void GrpcServer::Shutdown(absl::Duration deadline) {
  if (server_ == nullptr) return;
  server_->GetHealthCheckService()->Shutdown();
  server_->Shutdown(std::chrono::system_clock::now() +
                    absl::ToChronoMilliseconds(std::min(deadline, absl::Hours(24))));
}

std::shared_ptr<grpc::Channel> NewGrpcChannel(const std::string& address,
                                              const GrpcChannelOptions& options) {
  KeepGrpcUp();
  const GrpcTransportOptions& transport = options.transport;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(MessageBytes(transport));
  arguments.SetMaxSendMessageSize(MessageBytes(transport));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(transport.keepalive_interval));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(transport.keepalive_timeout));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A pod that starts again has another address under the same name; the default is 30 s.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, options.retries ? 1 : 0);
  // A channel of its own, so that a lost group's backoff is not another channel's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!options.bearer_token.empty()) {
    interceptors.push_back(std::make_unique<TokenInterceptorFactory>(options.bearer_token));
  }
  const bool plain = options.credentials == nullptr || address.starts_with(kUnixAbstract);
  std::shared_ptr<grpc::Channel> channel = grpc::experimental::CreateCustomChannelWithInterceptors(
      address, plain ? grpc::InsecureChannelCredentials() : options.credentials, arguments,
      std::move(interceptors));
  KeepChannel(channel);
  return channel;
}

void InitGrpcLog() {
  gpr_set_log_function(LogToSpdlog);
  // It has a line on standard error for every request that is not UTF-8.
  google::protobuf::SetLogHandler(LogProtobufToSpdlog);
}

}  // namespace weft
