#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace weft {

// One request of a benchmark, as the client saw it.
struct BenchSample {
  bool ok = false;  // the rest counts only then
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t cached_tokens = 0;  // of the input
  absl::Duration time_to_first_token;
  absl::Duration latency;                   // to the last message
  std::vector<absl::Duration> inter_token;  // between messages: a message may bring several tokens
};

// Of some times; all 0 when there are none.
struct BenchTimes {
  absl::Duration mean;
  absl::Duration median;
  absl::Duration p99;
};

struct BenchSummary {
  std::int64_t completed = 0;
  std::int64_t failed = 0;
  absl::Duration duration;
  // Of the completed ones.
  std::int64_t input_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t cached_tokens = 0;
  BenchTimes ttft;  // time to first token
  BenchTimes tpot;  // (latency - ttft) / (output_tokens - 1) of requests with 2 tokens or more
  BenchTimes itl;   // inter-token latency
  BenchTimes e2el;  // latency

  double request_throughput() const { return PerSecond(completed); }
  double output_throughput() const { return PerSecond(output_tokens); }
  double total_token_throughput() const { return PerSecond(input_tokens + output_tokens); }
  // What had to be computed of the prompts.
  double uncached_input_throughput() const { return PerSecond(input_tokens - cached_tokens); }
  double cache_hit_ratio() const {
    return input_tokens == 0
               ? 0
               : static_cast<double>(cached_tokens) / static_cast<double>(input_tokens);
  }

 private:
  double PerSecond(std::int64_t count) const;
};

BenchSummary Summarize(absl::Span<const BenchSample> samples, absl::Duration duration);

// The value below which `percent` (0 to 100) of the times are, interpolated between the two nearest
// as numpy.percentile does; 0 when there are none.
absl::Duration Percentile(std::vector<absl::Duration> times, double percent);

// What all groups of the server say of themselves.
struct BenchServer {
  std::int64_t evictions = 0;     // during the run: KV blocks
  std::int64_t preemptions = 0;   // during the run
  std::int32_t peak_running = 0;  // since the groups have started
};

// How the load was made, as it is shown.
struct BenchLoad {
  std::optional<std::int32_t> max_concurrency;
  std::optional<double> request_rate;  // per second; nothing: all at once
  double burstiness = 1;
};

// The table that `vllm bench serve` prints.
std::string FormatBenchTable(const BenchSummary& summary, const BenchLoad& load,
                             const BenchServer& server);
// One line of JSON with the names of vLLM's result files.
std::string BenchToJson(const BenchSummary& summary, const BenchLoad& load,
                        const BenchServer& server);

}  // namespace weft
