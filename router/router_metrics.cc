#include "router/router_metrics.h"

#include <string>

#include "server/error_reason.h"
#include "server/finish_reason.h"

namespace weft {
namespace {

// Whether nobody took the request, as opposed to somebody who then lost it or was told to stop.
bool IsReject(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
      return false;
    default:
      return ReasonOf(status) != kReasonRankLost;
  }
}

}  // namespace

RouterMetrics::RouterMetrics(MetricRegistry& registry)
    : registry_(registry),
      retries_(registry.Get(metrics::kRouterRetries)),
      replays_(registry.Get(metrics::kRouterReplays)) {}

void RouterMetrics::OnEnd(const absl::Status& status, v1::FinishReason finish_reason, bool sent,
                          const std::string& tenant) {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  if (!status.ok() && !absl::IsCancelled(status)) recent_errors_.Add(status);
  const std::string outcome = absl::StatusCodeToString(status.code());
  std::string reason =
      status.ok() ? std::string(FinishReasonName(finish_reason)) : ReasonOf(status);
  if (!sent && IsReject(status)) {
    registry_.Get(metrics::kRouterRejects, {{"reason", reason.empty() ? outcome : reason}})
        .Increment();
  }
  if (reason.empty()) reason = "none";
  MetricLabels labels = {{"outcome", outcome}, {"reason", reason}};
  if (!tenant.empty()) labels["tenant"] = tenant;
  registry_.Get(metrics::kRouterRequests, labels).Increment();
}

void RouterMetrics::OnHandoff(const char* outcome) {
  registry_.Get(metrics::kRouterHandoffs, {{"outcome", outcome}}).Increment();
}

std::unique_ptr<MetricRegistry::Reader> RouterMetrics::Read(const Cluster& cluster,
                                                            const TextPool& text_pool) {
  return registry_.AddReader([this, &cluster, &text_pool](MetricReadings& readings) {
    const auto set = [&](const auto& spec, auto value, const MetricLabels& labels = {}) {
      readings.Set(spec, static_cast<double>(value), labels);
    };
    set(metrics::kRouterRequestsInFlight, in_flight_.load(std::memory_order_relaxed));
    set(metrics::kStreamBufferBytes, stream_buffer_bytes_.load(std::memory_order_relaxed));
    set(metrics::kRouterQueuedRequests, text_pool.num_waiting(), {{"stage", "tokenize"}});
    set(metrics::kRouterQueuedRequests, cluster.num_waiting(), {{"stage", "place"}});
    int ready = 0;
    for (const std::shared_ptr<GroupLink>& link : cluster.links()) {
      ready += link->Snapshot()->ready ? 1 : 0;
      const MetricLabels group = {{"group", link->address()}};
      set(metrics::kRouterPlacements, link->num_placements(), group);
      set(metrics::kRouterBreakerOpen, link->Load().breaker_open ? 1 : 0, group);
      const auto [blocks, bytes] = link->IndexSize();
      set(metrics::kRouterIndexBlocks, blocks, group);
      set(metrics::kRouterIndexBytes, bytes, group);
    }
    set(metrics::kRouterPromptTokens, cluster.placed().prompt_tokens);
    set(metrics::kRouterCachedTokens, cluster.placed().cached_tokens);
    set(metrics::kRouterGroups, cluster.links().size());
    set(metrics::kRouterGroupsReady, ready);
  });
}

}  // namespace weft
