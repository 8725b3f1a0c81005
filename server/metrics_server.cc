#include "server/metrics_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "civetweb.h"
#include "fmt/format.h"
#include "server/base/log.h"

namespace weft {
namespace {

constexpr std::string_view kMetricsType = "text/plain; version=0.0.4; charset=utf-8";
constexpr std::string_view kPageType = "text/html; charset=utf-8";
constexpr std::string_view kTextType = "text/plain; charset=utf-8";

// Runs call(fd, address, its length) on a socket for HOST:PORT; the error of it, or nothing.
template <typename Call>
std::string OnSocket(const std::string& host, int port, Call call) {
  std::string name = host;
  if (name.starts_with('[') && name.ends_with(']')) name = name.substr(1, name.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    return gai_strerror(error);
  }
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool ok = fd >= 0 && call(fd, found->ai_addr, found->ai_addrlen) == 0;
  const std::string error = ok ? "" : std::strerror(errno);
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return error;
}

// Why civetweb could not listen: it does not say.
std::string BindError(const std::string& host, int port) {
  const std::string error = OnSocket(host, port, bind);
  return error.empty() ? "the server did not start" : error;
}

int LogMessage(const mg_connection*, const char* message) {
  spdlog::debug("metrics server: {}", message);
  return 1;
}

void Send(mg_connection* connection, std::string_view status, std::string_view type,
          std::string_view body) {
  const std::string head = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", status,
      type, body.size());
  mg_write(connection, head.data(), head.size());
  const bool head_only =
      std::string_view(mg_get_request_info(connection)->request_method) == "HEAD";
  if (!head_only) mg_write(connection, body.data(), body.size());
}

}  // namespace

void MetricsFlags::AddTo(OptionParser& parser, std::string_view default_port) {
  parser.Group("Metrics");
  parser.Add(
      "--metrics-port", &metrics_port,
      fmt::format("Where HTTP serves /metrics, /healthz and /readyz; 0 picks a free port, -1 "
                  "is none; default: {}",
                  default_port),
      Range(-1, 65535));
  parser.Add("--metrics-host", &metrics_host, "Address that port is on; 0.0.0.0 for all");
}

std::vector<std::string> MetricsFlags::Arguments(const OptionParser& parser) {
  return parser.Arguments(
      [](std::string_view name) { return name == "--metrics-port" || name == "--metrics-host"; });
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, std::int32_t port, const MetricRegistry& registry) {
  std::unique_ptr<MetricsServer> server(new MetricsServer(registry));
  const std::string listen = fmt::format("{}:{}", host, port);
  // A connection that sends nothing has a thread until the timeout: a browser opens some, and
  // probes have to be answered within seconds all the same.
  const char* options[] = {"listening_ports",    listen.c_str(), "num_threads", "16",
                           "request_timeout_ms", "2000",         nullptr};
  mg_callbacks callbacks = {};
  callbacks.log_message = LogMessage;
  mg_init_data init = {
      .callbacks = &callbacks, .user_data = nullptr, .configuration_options = options};
  unsigned code = 0;
  char text[256] = "";
  mg_error_data error = {.code = &code, .text = text, .text_buffer_size = sizeof(text)};
  server->context_ = mg_start2(&init, &error);
  if (server->context_ == nullptr) {
    return absl::UnavailableError(fmt::format(
        "cannot serve metrics on {}: {} (--metrics-port: 0 picks a free one, -1 is none)", listen,
        BindError(host, port)));
  }
  mg_server_port bound = {};
  mg_get_server_ports(server->context_, 1, &bound);
  server->host_ = host;
  server->port_ = bound.port;
  mg_set_request_handler(server->context_, "/", Handle, server.get());
  return server;
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const MetricsFlags& flags, std::int32_t default_port, const MetricRegistry& registry) {
  const std::int32_t port = flags.metrics_port.value_or(default_port);
  if (port < 0) return nullptr;
  auto server = Start(flags.metrics_host, port, registry);
  if (server.ok()) spdlog::info("metrics at http://{}/metrics", (*server)->address());
  return server;
}

MetricsServer::~MetricsServer() {
  if (context_ == nullptr) return;
  // Its listening thread sees that it should stop every 2 s, or when somebody connects.
  std::atomic<bool> stopped = false;
  std::thread stopper([&] {
    mg_stop(context_);
    stopped = true;
  });
  while (!stopped) {
    OnSocket(host_, port_, connect);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stopper.join();
}

void MetricsServer::SetLiveness(Check check) {
  MutexLock lock(mutex_);
  liveness_ = std::move(check);
}

void MetricsServer::SetReadiness(Check check) {
  MutexLock lock(mutex_);
  readiness_ = std::move(check);
}

void MetricsServer::SetStatusPage(std::function<std::string()> page) {
  MutexLock lock(mutex_);
  status_page_ = std::move(page);
}

int MetricsServer::Handle(mg_connection* connection, void* self) {
  const mg_request_info& request = *mg_get_request_info(connection);
  const std::string_view method = request.request_method;
  if (method != "GET" && method != "HEAD") {
    Send(connection, "405 Method Not Allowed", kTextType, "GET and HEAD are allowed\n");
    return 405;
  }
  static_cast<MetricsServer*>(self)->Answer(connection, request.local_uri);
  return 200;  // it is answered, whatever the status
}

void MetricsServer::Answer(mg_connection* connection, std::string_view path) {
  if (path == "/metrics") {
    Send(connection, "200 OK", kMetricsType, registry_.Scrape());
    return;
  }
  if (path == "/statusz") {
    MutexLock lock(mutex_);
    if (status_page_ != nullptr) {
      Send(connection, "200 OK", kPageType, status_page_());
      return;
    }
  }
  absl::Status status;
  if (path == "/healthz") {
    MutexLock lock(mutex_);
    if (liveness_ != nullptr) status = liveness_();
  } else if (path == "/readyz") {
    MutexLock lock(mutex_);
    status = readiness_ != nullptr ? readiness_() : absl::UnavailableError("starting");
  } else {
    Send(connection, "404 Not Found", kTextType, "/metrics, /healthz and /readyz are here\n");
    return;
  }
  if (status.ok()) {
    Send(connection, "200 OK", kTextType, "ok\n");
  } else {
    Send(connection, "503 Service Unavailable", kTextType, std::string(status.message()) + "\n");
  }
}

}  // namespace weft
