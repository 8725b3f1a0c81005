#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/policy.h"

namespace weft {

// Placement policies on a recorded trace, without a cluster: `weft-router --simulate`.

struct TraceRequest {
  double arrival = 0;  // seconds
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::vector<std::int64_t> blocks;  // of the prompt: equal ids, equal tokens up to their end
};

// Mooncake's public format, a JSON object per line: timestamp (ms), input_length, output_length,
// hash_ids. INVALID_ARGUMENT with the line. Sorted by arrival.
absl::StatusOr<std::vector<TraceRequest>> ParseTrace(std::string_view text);

// A group as a queue: prompts one after the other at a steady rate, outputs beside each other at a
// steady pace, a prefix cache of the least recently used blocks.
struct SimulatedGroups {
  std::int32_t count = 4;
  std::int64_t num_blocks = 100'000;  // of each group's prefix cache
  std::int64_t block_size = 512;      // tokens of a block of the trace
  double prefill_tokens_per_second = 10'000;
  double seconds_per_token = 0.02;
};

struct SimulationResult {
  double cached = 0;                        // share of the prompts' tokens that was not computed
  double ttft_p50 = 0, ttft_p99 = 0;        // seconds until the first token
  double latency_p50 = 0, latency_p99 = 0;  // seconds until the last
  double busiest = 0;  // share of all requests that the group with the most of them had
};

// `requests` as from ParseTrace(); not empty.
SimulationResult Simulate(absl::Span<const TraceRequest> requests, const SimulatedGroups& groups,
                          Policy policy);

// A table of all policies, for people.
std::string SimulationReport(absl::Span<const TraceRequest> requests, const SimulatedGroups& groups,
                             std::int64_t request_tokens);

}  // namespace weft
