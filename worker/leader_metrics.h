#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "server/metrics.h"
#include "worker/engine/engine.h"

namespace weft {

// When what happened to one request, as the leader saw it.
struct RequestTimes {
  absl::Time arrival;
  absl::Time first_token = absl::InfiniteFuture();
  absl::Time last_token = absl::InfiniteFuture();
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_generated = 0;
};

// What the leader counts as it happens; the gauges and totals of EngineStats are read at a scrape.
// Nothing here allocates.
//
// Threading: the engine thread. The registry outlives it.
class LeaderMetrics {
 public:
  explicit LeaderMetrics(MetricRegistry& registry);

  void OnStep(std::int32_t num_tokens);
  void OnKvTransfer(absl::Duration took);
  // `output_index` is TokenEvent::output_index: a first token that was told elsewhere is not timed.
  void OnToken(RequestTimes& request, std::int32_t output_index, absl::Time now);
  // Once for each request, however it ended. `admitted` is TokenEvent::admitted.
  void OnEnd(const RequestTimes& request, absl::Time admitted, FinishReason reason, absl::Time now);

 private:
  prometheus::Histogram& iteration_tokens_;
  prometheus::Histogram& kv_transfer_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& inter_token_latency_;
  prometheus::Histogram& time_per_output_token_;
  prometheus::Histogram& e2e_latency_;
  prometheus::Histogram& queue_time_;
  prometheus::Histogram& prefill_time_;
  prometheus::Histogram& decode_time_;
  prometheus::Histogram& prompt_tokens_;
  prometheus::Histogram& generation_tokens_;
  prometheus::Counter& stopped_;
  prometheus::Counter& length_;
  prometheus::Counter& aborted_;
  prometheus::Counter& failed_;
  prometheus::Counter& handed_off_;  // the prompt's KV went to another group
};

}  // namespace weft
