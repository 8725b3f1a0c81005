#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/metrics.h"
#include "server/options.h"

struct mg_context;
struct mg_connection;

namespace weft {

// Where a process serves its metrics: for weft-router and weft-worker, which do, and for
// `weft serve`, which passes it on.
struct MetricsFlags {
  std::optional<std::int32_t> metrics_port;  // -1: none
  std::string metrics_host = "127.0.0.1";

  // Adds both flags; `default_port` is for the help. `this` must outlive `parser`.
  void AddTo(OptionParser& parser, std::string_view default_port);
  // After parser.Parse(): the arguments that set the same in another program.
  static std::vector<std::string> Arguments(const OptionParser& parser);
};

// A small HTTP server beside the gRPC one:
//   /metrics  the registry, in Prometheus's text format
//   /healthz  200 while this process gets on with its work or has none, else 503 and why
//   /readyz   200 while it takes requests, else 503 and why
//   /statusz  a page for people, if there is one
// Anything else is 404. GET and HEAD only.
//
// Thread-safe. Handlers run on a few threads of the server's own.
class MetricsServer {
 public:
  using Check = std::function<absl::Status()>;

  // Listens; port 0 picks a free one. UNAVAILABLE when the address is in use. `registry` outlives
  // the server.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& host,
                                                              std::int32_t port,
                                                              const MetricRegistry& registry);
  // As the flags say, and the log tells where; null when they say none.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const MetricsFlags& flags,
                                                              std::int32_t default_port,
                                                              const MetricRegistry& registry);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // HOST:PORT.
  std::string address() const { return host_ + ":" + std::to_string(port_); }

  // What the probes ask; null is OK for /healthz and not yet ready for /readyz. When these return,
  // the previous check is not running and will not run again.
  void SetLiveness(Check check);
  void SetReadiness(Check check);
  // Makes the HTML of /statusz, likewise.
  void SetStatusPage(std::function<std::string()> page);

 private:
  explicit MetricsServer(const MetricRegistry& registry) : registry_(registry) {}
  static int Handle(mg_connection* connection, void* self);
  void Answer(mg_connection* connection, std::string_view path);

  const MetricRegistry& registry_;
  std::string host_;
  int port_ = 0;
  mg_context* context_ = nullptr;
  Mutex mutex_;
  Check liveness_ ABSL_GUARDED_BY(mutex_);
  Check readiness_ ABSL_GUARDED_BY(mutex_);
  std::function<std::string()> status_page_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
