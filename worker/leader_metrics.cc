#include "worker/leader_metrics.h"

#include <algorithm>

namespace weft {
namespace {

prometheus::Counter& Ended(MetricRegistry& registry, const char* reason) {
  return registry.Get(metrics::kRequestSuccess, {{"finished_reason", reason}});
}

}  // namespace

LeaderMetrics::LeaderMetrics(MetricRegistry& registry)
    : iteration_tokens_(registry.Get(metrics::kIterationTokens)),
      kv_transfer_(registry.Get(metrics::kKvTransferSeconds)),
      time_to_first_token_(registry.Get(metrics::kTimeToFirstToken)),
      inter_token_latency_(registry.Get(metrics::kInterTokenLatency)),
      time_per_output_token_(registry.Get(metrics::kRequestTimePerOutputToken)),
      e2e_latency_(registry.Get(metrics::kE2eRequestLatency)),
      queue_time_(registry.Get(metrics::kRequestQueueTime)),
      prefill_time_(registry.Get(metrics::kRequestPrefillTime)),
      decode_time_(registry.Get(metrics::kRequestDecodeTime)),
      prompt_tokens_(registry.Get(metrics::kRequestPromptTokens)),
      generation_tokens_(registry.Get(metrics::kRequestGenerationTokens)),
      stopped_(Ended(registry, "stop")),
      length_(Ended(registry, "length")),
      aborted_(Ended(registry, "abort")),
      failed_(Ended(registry, "error")),
      handed_off_(Ended(registry, "handoff")) {}

void LeaderMetrics::OnStep(std::int32_t num_tokens) { iteration_tokens_.Observe(num_tokens); }

void LeaderMetrics::OnKvTransfer(absl::Duration took) {
  kv_transfer_.Observe(absl::ToDoubleSeconds(took));
}

void LeaderMetrics::OnToken(RequestTimes& request, std::int32_t output_index, absl::Time now) {
  if (request.num_generated == 0) {
    request.first_token = now;
    if (output_index == 0) {
      time_to_first_token_.Observe(absl::ToDoubleSeconds(now - request.arrival));
    }
  } else {
    inter_token_latency_.Observe(absl::ToDoubleSeconds(now - request.last_token));
  }
  request.last_token = now;
  ++request.num_generated;
}

void LeaderMetrics::OnEnd(const RequestTimes& request, absl::Time admitted, FinishReason reason,
                          absl::Time now) {
  // What did not happen is put at the end: its time is 0.
  const absl::Time start = std::min(admitted, now);
  const absl::Time first_token = std::min(request.first_token, now);
  e2e_latency_.Observe(absl::ToDoubleSeconds(now - request.arrival));
  queue_time_.Observe(absl::ToDoubleSeconds(start - request.arrival));
  prefill_time_.Observe(absl::ToDoubleSeconds(first_token - start));
  decode_time_.Observe(absl::ToDoubleSeconds(now - first_token));
  prompt_tokens_.Observe(request.num_prompt_tokens);
  generation_tokens_.Observe(request.num_generated);
  if (request.num_generated > 1) {
    time_per_output_token_.Observe(absl::ToDoubleSeconds(request.last_token - request.first_token) /
                                   (request.num_generated - 1));
  }
  switch (reason) {
    case FinishReason::kStopToken:
    case FinishReason::kEos:
      stopped_.Increment();
      break;
    case FinishReason::kLength:
      length_.Increment();
      break;
    case FinishReason::kAborted:
    case FinishReason::kDeadline:
      aborted_.Increment();
      break;
    case FinishReason::kHandedOff:
      handed_off_.Increment();
      break;
    case FinishReason::kNone:
    case FinishReason::kError:
      failed_.Increment();
      break;
  }
}

}  // namespace weft
