#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "router/cluster.h"
#include "router/recent_errors.h"
#include "router/text_pool.h"
#include "server/metrics.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// What the router counts as it happens. Thread-safe.
class RouterMetrics {
 public:
  // The registry outlives it.
  explicit RouterMetrics(MetricRegistry& registry);

  // A Generate call has come.
  void OnRequest() { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  // It has ended with `status` and, if its stream said so, `finish_reason`; `sent` is whether its
  // stream had a message; `tenant` is empty when the router knows none.
  void OnEnd(const absl::Status& status, v1::FinishReason finish_reason, bool sent,
             const std::string& tenant = "");
  // It is placed again.
  void OnRetry() { retries_.Increment(); }
  // It goes on elsewhere.
  void OnReplay() { replays_.Increment(); }

  std::int64_t requests_in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  const RecentErrors& recent_errors() const { return recent_errors_; }

  // A prompt was handed over to another group, or not: done, failed, short.
  void OnHandoff(const char* outcome);

  // For StreamWriterOptions.
  std::atomic<std::int64_t>* stream_buffer_bytes() { return &stream_buffer_bytes_; }

  // What a scrape reads: the above and what waits in `cluster` and `text_pool`. All outlive the
  // result.
  std::unique_ptr<MetricRegistry::Reader> Read(const Cluster& cluster, const TextPool& text_pool);

 private:
  MetricRegistry& registry_;
  prometheus::Counter& retries_;
  prometheus::Counter& replays_;
  std::atomic<std::int64_t> in_flight_{0};
  RecentErrors recent_errors_;
  std::atomic<std::int64_t> stream_buffer_bytes_{0};
};

}  // namespace weft
