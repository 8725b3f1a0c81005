#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "router/access_log.h"
#include "router/cluster.h"
#include "router/dns_groups.h"
#include "router/grpc_leader_client.h"
#include "router/request_registry.h"
#include "router/router_metrics.h"
#include "router/router_service.h"
#include "router/simulate.h"
#include "router/status_page.h"
#include "router/tenants.h"
#include "router/text/chat_template.h"
#include "router/text/tokenizer.h"
#include "router/text_pool.h"
#include "server/base/bounded_time.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/base/read_file.h"
#include "server/base/status_macros.h"
#include "server/file_limit.h"
#include "server/group_flags.h"
#include "server/grpc_server.h"
#include "server/metrics_server.h"
#include "server/options.h"
#include "server/router_flags.h"
#include "server/signals.h"
#include "server/supervisor_link.h"
#include "server/ticker.h"
#include "server/tls.h"
#include "server/version.h"

namespace weft {
namespace {

// How late health checks may learn that the first group came or the last one went.
constexpr absl::Duration kReadinessInterval = absl::Milliseconds(20);
constexpr auto kReloadInterval = std::chrono::seconds(1);

constexpr std::int32_t kDefaultMetricsPort = 9400;
// The main loop turns far more often.
constexpr absl::Duration kStallTimeout = absl::Seconds(5);

struct Flags : CommonFlags, RouterFlags {
  std::vector<std::string> groups;
  TlsFiles worker_tls;
  MetricsFlags metrics;
  std::string simulate;
  SimulatedGroups simulated;
};

// Null without --api-keys-file.
absl::StatusOr<std::unique_ptr<Tenants>> LoadTenants(const Flags& flags) {
  if (flags.api_keys_file.empty()) return nullptr;
  return Tenants::Load(flags.api_keys_file);
}

// Null with --skip-tokenizer-init.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const Flags& flags) {
  if (flags.skip_tokenizer_init) return nullptr;
  if (flags.model.empty()) {
    return absl::InvalidArgumentError(
        "no model: give --model DIR, whose tokenizer.json is read, or --skip-tokenizer-init");
  }
  RETURN_IF_ERROR(flags.CheckModelDir());
  return Tokenizer::Load(flags.model + "/tokenizer.json");
}

// Null when the model has none, or none that can be used: text and token ids still work.
absl::StatusOr<std::unique_ptr<ChatTemplate>> LoadChatTemplate(const Flags& flags) {
  if (flags.skip_tokenizer_init) return nullptr;
  absl::StatusOr<std::unique_ptr<ChatTemplate>> loaded = ChatTemplate::Load(flags.model);
  if (loaded.ok()) return loaded;
  spdlog::warn("no chat prompts: {}", std::string(loaded.status().message()));
  return nullptr;
}

std::chrono::milliseconds ToChrono(absl::Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(ToBoundedChrono(duration));
}

RequestLimits LimitsOf(const Flags& flags) {
  return {.served_model_name = flags.ServedModelName(),
          .text = !flags.skip_tokenizer_init,
          .max_prompt_bytes = flags.max_prompt_bytes,
          .max_prompt_tokens = flags.max_prompt_tokens,
          .max_chat_messages = flags.max_chat_messages,
          .max_n = flags.max_n,
          .max_stop_strings = flags.max_stop_strings,
          .max_stop_string_bytes = flags.max_stop_string_bytes,
          .max_stop_token_ids = flags.max_stop_token_ids,
          .max_bad_words = flags.max_bad_words,
          .max_bad_word_tokens = flags.max_bad_word_tokens,
          .max_logit_bias = flags.max_logit_bias,
          .max_logprobs = flags.max_logprobs,
          .max_detokenize_tokens = flags.max_detokenize_tokens};
}

GrpcTransportOptions TransportOf(const Flags& flags) {
  return {.max_message_bytes = flags.max_message_bytes,
          .keepalive_interval = flags.keepalive_interval,
          .keepalive_timeout = flags.keepalive_timeout};
}

ClusterOptions ClusterOptionsOf(const Flags& flags, RoutingPolicy policy,
                                const GrpcChannelOptions& channel) {
  return {
      .link = {.heartbeat_timeout = ToChrono(flags.heartbeat_timeout),
               .min_backoff = ToChrono(flags.min_reconnect_backoff),
               .max_backoff = ToChrono(flags.max_reconnect_backoff),
               .watch_blocks = policy == RoutingPolicy::kPrefixAware,
               .max_waiting = flags.max_waiting_per_group,
               .min_retry_backoff = ToChrono(flags.min_retry_backoff),
               .max_retry_backoff = ToChrono(flags.max_retry_backoff),
               .breaker = {.failures = flags.breaker_failures,
                           .open_time = ToChrono(flags.breaker_open_time)},
               .slow_start = ToChrono(flags.slow_start),
               .first_token_timeout = ToChrono(flags.first_token_timeout),
               .connect =
                   [channel](const std::string& address) {
                     return NewGrpcLeaderClient(address, channel);
                   }},
      .policy = policy,
      .request_tokens = flags.routing_request_tokens,
      .max_waiting = flags.max_queued_requests,
      .queue_timeout = ToChrono(flags.queue_timeout),
      .retry_budget = {.ratio = flags.retry_budget_ratio, .min_retries = flags.retry_budget_min}};
}

GrpcServerOptions ServerOptionsOf(const Flags& flags) {
  return {.listen_addresses = flags.ListenAddresses(),
          .tls = flags.tls,
          .transport = TransportOf(flags),
          .min_ping_interval = flags.min_ping_interval,
          .max_connection_age = flags.max_connection_age,
          .max_connection_age_grace = flags.max_connection_age_grace,
          .max_concurrent_streams = flags.max_concurrent_streams,
          .memory_quota_bytes = flags.memory_quota_bytes};
}

// Alive while the main loop turns, which takes the cluster's lock; ready while a group is.
void SetProbes(MetricsServer* server, const Cluster& cluster,
               const std::atomic<std::int64_t>& last_turn_ns) {
  if (server == nullptr) return;
  server->SetLiveness([&last_turn_ns] {
    const absl::Duration silence = absl::Nanoseconds(absl::GetCurrentTimeNanos() - last_turn_ns);
    if (silence <= kStallTimeout) return absl::OkStatus();
    return absl::UnavailableError(
        fmt::format("the main loop has stood still for {:.1f} s", absl::ToDoubleSeconds(silence)));
  });
  server->SetReadiness([&cluster] {
    return cluster.Snapshot()->AnyReady() ? absl::OkStatus()
                                          : absl::UnavailableError("no group is ready");
  });
}

// What it reads outlives the server.
void SetStatusPage(MetricsServer* server, const std::string& model, const Cluster& cluster,
                   const RouterMetrics& metrics) {
  if (server == nullptr) return;
  server->SetStatusPage([&cluster, &metrics, model, started = absl::Now()] {
    const absl::Time now = absl::Now();
    return StatusPage({.version = std::string(Version()),
                       .model = model,
                       .now = now,
                       .uptime = now - started,
                       .requests_in_flight = metrics.requests_in_flight(),
                       .requests_waiting = cluster.num_waiting(),
                       .cluster = *cluster.Snapshot(),
                       .errors = metrics.recent_errors().All()});
  });
}

absl::Status Run(const Flags& flags, TerminationSignals& signals, SupervisorLink& link) {
  RETURN_IF_ERROR(RaiseFileLimit(kMinServerFiles));
  if (flags.groups.empty()) {
    return absl::InvalidArgumentError("no group: give --groups ADDRESS[,ADDRESS...]");
  }
  const std::optional<RoutingPolicy> policy = ParseRoutingPolicy(flags.routing_policy);
  if (!policy) {
    return absl::InvalidArgumentError(fmt::format("--routing-policy is '{}'; it can be {}",
                                                  flags.routing_policy, kRoutingPolicies));
  }
  GrpcChannelOptions channel = {.transport = TransportOf(flags)};
  ASSIGN_OR_RETURN(channel.credentials, NewClientCredentials(flags.worker_tls));
  ASSIGN_OR_RETURN(const std::unique_ptr<Tenants> tenants, LoadTenants(flags));
  ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, LoadTokenizer(flags));

  ASSIGN_OR_RETURN(const std::unique_ptr<ChatTemplate> chat_template, LoadChatTemplate(flags));
  MetricRegistry metric_registry(flags.ServedModelName());
  RouterMetrics metrics(metric_registry);
  GenerateContext context = {.limits = LimitsOf(flags),
                             .max_attempts = static_cast<std::uint32_t>(flags.max_attempts),
                             .max_replays = static_cast<std::uint32_t>(flags.max_replays),
                             .pd_min_prefill_tokens = flags.pd_min_prefill_tokens,
                             .max_stream_buffer_bytes = flags.max_stream_buffer_bytes,
                             .tokenizer = tokenizer.get(),
                             .chat_template = chat_template.get()};
  RequestRegistry registry(flags.max_requests);
  Cluster cluster(ClusterOptionsOf(flags, *policy, channel));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<DnsGroups> groups,
      DnsGroups::Start(flags.groups, ToChrono(flags.dns_refresh_interval), NewSystemResolver(),
                       [&cluster](const auto& addresses) { cluster.SetGroups(addresses); }));
  TextPool text_pool(flags.tokenizer_threads, static_cast<std::size_t>(flags.max_queued_requests));
  context.registry = &registry;
  context.cluster = &cluster;
  context.text_pool = &text_pool;
  context.metrics = &metrics;
  context.tenants = tenants.get();
  if (flags.access_log && spdlog::should_log(spdlog::level::info)) {
    context.access_log = NewAccessLog();
  }
  std::optional<Ticker> reload;
  if (tenants != nullptr) reload.emplace(kReloadInterval, [&tenants] { tenants->Reload(); });
  const auto reader = metrics.Read(cluster, text_pool);
  prometheus::Gauge& drain_deadline = metric_registry.Get(metrics::kDrainDeadline);
  ASSIGN_OR_RETURN(const std::unique_ptr<MetricsServer> metrics_server,
                   MetricsServer::Start(flags.metrics, kDefaultMetricsPort, metric_registry));
  if (metrics_server != nullptr) context.metrics_address = metrics_server->address();
  RouterService service(context);
  ASSIGN_OR_RETURN(const std::unique_ptr<GrpcServer> server,
                   GrpcServer::Start(ServerOptionsOf(flags), {&service}));
  server->SetServing(v1::Inference::service_full_name(), false);
  spdlog::info("listening on {}", fmt::join(server->addresses(), ", "));

  // Readiness follows the groups; the supervisor hears of the first time.
  std::atomic<std::int64_t> last_turn_ns = absl::GetCurrentTimeNanos();
  SetProbes(metrics_server.get(), cluster, last_turn_ns);
  SetStatusPage(metrics_server.get(), flags.ServedModelName(), cluster, metrics);
  bool was_ready = false;
  bool reported = false;
  do {
    last_turn_ns = absl::GetCurrentTimeNanos();
    const bool ready = cluster.Snapshot()->AnyReady();
    if (ready != was_ready) server->SetServing(v1::Inference::service_full_name(), ready);
    if (ready && !reported) link.ReportReady({{"address", server->addresses().front()}});
    was_ready = ready;
    reported |= ready;
  } while (signals.Wait(kReadinessInterval) == 0);
  if (metrics_server != nullptr) {
    metrics_server->SetLiveness(nullptr);
    metrics_server->SetStatusPage(nullptr);
    metrics_server->SetReadiness([] { return absl::UnavailableError("draining"); });
  }
  spdlog::info("stopping: requests in flight have {}", absl::FormatDuration(flags.drain_timeout));
  server->SetServing(v1::Inference::service_full_name(), false);
  drain_deadline.Set(static_cast<double>(absl::ToUnixSeconds(absl::Now() + flags.drain_timeout)));
  service.Drain(flags.drain_timeout);
  server->Disconnect();
  return absl::OkStatus();
}

constexpr std::uintmax_t kMaxTraceBytes = std::uintmax_t{1} << 32;

absl::Status RunSimulation(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.simulate, kMaxTraceBytes));
  const auto requests = ParseTrace(text);
  if (!requests.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {}", flags.simulate, std::string(requests.status().message())));
  }
  PrintOut(SimulationReport(*requests, flags.simulated, flags.routing_request_tokens));
  return absl::OkStatus();
}

void AddSimulationTo(OptionParser& parser, Flags& flags) {
  const Range positive(1, std::numeric_limits<std::int32_t>::max());
  SimulatedGroups& groups = flags.simulated;
  parser.Group("Simulation");
  parser.Add("--simulate", &flags.simulate,
             "Replays a trace (Mooncake's format) under every policy, prints a table and exits");
  parser.Add("--simulate-groups", &groups.count, "Groups", Range(1, 65536));
  parser.Add("--simulate-blocks", &groups.num_blocks, "Blocks of each group's prefix cache",
             positive);
  parser.Add("--simulate-block-size", &groups.block_size, "Tokens of a block of the trace",
             positive);
  parser.Add("--simulate-prefill-rate", &groups.prefill_tokens_per_second,
             "Tokens of prompts that a group computes in a second", Range(1, 1e9));
  parser.Add("--simulate-token-time", &groups.seconds_per_token,
             "Seconds from one token of a request to the next", Range(0, 1e6));
}

int Main(int argc, char** argv) {
  TerminationSignals signals;
  SupervisorLink link;
  Flags flags;
  OptionParser parser("weft-router", "The front door of a Weft cluster: text in, text out.");
  flags.CommonFlags::AddTo(parser);
  flags.RouterFlags::AddTo(parser);
  flags.metrics.AddTo(parser, "9400");
  parser.Add("--groups", &flags.groups,
             "Leaders of the groups: HOST:PORT, unix-abstract:NAME, or dns:///HOST:PORT for one at "
             "each address of a name; several with commas");
  flags.worker_tls.AddTo(parser, "--worker-",
                         "Certificate that leaders see, if they ask for one: a PEM file",
                         "Leaders are reached by TLS, and have a certificate of one of the CAs in "
                         "this PEM file that names their host");
  AddSimulationTo(parser, flags);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  InitLog("weft-router", flags.log_level);
  InitGrpcLog();
  const absl::Status status =
      flags.simulate.empty() ? Run(flags, signals, link) : RunSimulation(flags);
  if (status.ok()) return FinishOutput(0);
  PrintErr("weft-router: {}\n", std::string(status.message()));
  return kExitConfigError;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  weft::HoldStandardFiles();
  return weft::Main(argc, argv);
}
