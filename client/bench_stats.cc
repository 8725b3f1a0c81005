#include "client/bench_stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace weft {
namespace {

constexpr int kTableWidth = 50;

BenchTimes TimesOf(const std::vector<absl::Duration>& times) {
  if (times.empty()) return {};
  const absl::Duration sum = std::accumulate(times.begin(), times.end(), absl::ZeroDuration());
  return {.mean = sum / static_cast<std::int64_t>(times.size()),
          .median = Percentile(times, 50),
          .p99 = Percentile(times, 99)};
}

struct TimesRow {
  std::string_view name;   // in the table
  std::string_view title;  // above it
  std::string_view key;    // in JSON
  BenchTimes BenchSummary::*times;
};
constexpr TimesRow kTimesRows[] = {
    {"TTFT", "Time to First Token", "ttft", &BenchSummary::ttft},
    {"TPOT", "Time per Output Token (excl. 1st token)", "tpot", &BenchSummary::tpot},
    {"ITL", "Inter-token Latency", "itl", &BenchSummary::itl},
    {"E2EL", "End-to-end Latency", "e2el", &BenchSummary::e2el},
};

std::string Row(std::string_view name, std::int64_t value) {
  return fmt::format("{:<40} {:<10}\n", name, value);
}
std::string Row(std::string_view name, double value) {
  return fmt::format("{:<40} {:<10.2f}\n", name, value);
}

}  // namespace

double BenchSummary::PerSecond(std::int64_t count) const {
  const double seconds = absl::ToDoubleSeconds(duration);
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

absl::Duration Percentile(std::vector<absl::Duration> times, double percent) {
  if (times.empty()) return absl::ZeroDuration();
  std::sort(times.begin(), times.end());
  const double at = percent / 100 * static_cast<double>(times.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, times.size() - 1);
  return times[below] + (times[above] - times[below]) * (at - std::floor(at));
}

BenchSummary Summarize(absl::Span<const BenchSample> samples, absl::Duration duration) {
  BenchSummary summary = {.duration = duration};
  std::vector<absl::Duration> ttft, tpot, itl, e2el;
  for (const BenchSample& sample : samples) {
    if (!sample.ok) {
      ++summary.failed;
      continue;
    }
    ++summary.completed;
    summary.input_tokens += sample.input_tokens;
    summary.output_tokens += sample.output_tokens;
    summary.cached_tokens += sample.cached_tokens;
    ttft.push_back(sample.time_to_first_token);
    e2el.push_back(sample.latency);
    itl.insert(itl.end(), sample.inter_token.begin(), sample.inter_token.end());
    if (sample.output_tokens > 1) {
      tpot.push_back((sample.latency - sample.time_to_first_token) / (sample.output_tokens - 1));
    }
  }
  summary.ttft = TimesOf(ttft);
  summary.tpot = TimesOf(tpot);
  summary.itl = TimesOf(itl);
  summary.e2el = TimesOf(e2el);
  return summary;
}

std::string FormatBenchTable(const BenchSummary& summary, const BenchLoad& load,
                             const BenchServer& server) {
  std::string table = fmt::format("{:=^{}}\n", " Serving Benchmark Result ", kTableWidth);
  table += Row("Successful requests:", summary.completed);
  table += Row("Failed requests:", summary.failed);
  if (load.max_concurrency) {
    table += Row("Maximum request concurrency:", std::int64_t{*load.max_concurrency});
  }
  if (load.request_rate) table += Row("Request rate configured (RPS):", *load.request_rate);
  table += Row("Benchmark duration (s):", absl::ToDoubleSeconds(summary.duration));
  table += Row("Total input tokens:", summary.input_tokens);
  table += Row("Total generated tokens:", summary.output_tokens);
  table += Row("Request throughput (req/s):", summary.request_throughput());
  table += Row("Output token throughput (tok/s):", summary.output_throughput());
  table += Row("Total Token throughput (tok/s):", summary.total_token_throughput());
  for (const TimesRow& row : kTimesRows) {
    const BenchTimes& times = summary.*row.times;
    table += fmt::format("{:-^{}}\n", row.title, kTableWidth);
    for (const auto& [name, time] :
         {std::pair{"Mean", times.mean}, {"Median", times.median}, {"P99", times.p99}}) {
      table += Row(fmt::format("{} {} (ms):", name, row.name), absl::ToDoubleMilliseconds(time));
    }
  }
  table += fmt::format("{:-^{}}\n", "KV Cache", kTableWidth);
  table += Row("Uncached input throughput (tok/s):", summary.uncached_input_throughput());
  table += Row("Prefix cache hit ratio (%):", 100 * summary.cache_hit_ratio());
  table += Row("Evicted KV blocks:", server.evictions);
  table += Row("Preemptions:", server.preemptions);
  table += Row("Peak running requests (since start):", std::int64_t{server.peak_running});
  return table + std::string(kTableWidth, '=') + "\n";
}

std::string BenchToJson(const BenchSummary& summary, const BenchLoad& load,
                        const BenchServer& server) {
  nlohmann::ordered_json json = {{"duration", absl::ToDoubleSeconds(summary.duration)},
                                 {"num_prompts", summary.completed + summary.failed},
                                 {"completed", summary.completed},
                                 {"failed", summary.failed},
                                 {"total_input_tokens", summary.input_tokens},
                                 {"total_output_tokens", summary.output_tokens},
                                 {"request_throughput", summary.request_throughput()},
                                 {"output_throughput", summary.output_throughput()},
                                 {"total_token_throughput", summary.total_token_throughput()},
                                 {"total_cached_tokens", summary.cached_tokens},
                                 {"uncached_input_throughput", summary.uncached_input_throughput()},
                                 {"prefix_cache_hit_ratio", summary.cache_hit_ratio()},
                                 {"evictions", server.evictions},
                                 {"preemptions", server.preemptions},
                                 {"peak_running", server.peak_running},
                                 {"burstiness", load.burstiness}};
  if (load.request_rate) {
    json["request_rate"] = *load.request_rate;
  } else {
    json["request_rate"] = "inf";
  }
  json["max_concurrency"] = nullptr;
  if (load.max_concurrency) json["max_concurrency"] = *load.max_concurrency;
  for (const TimesRow& row : kTimesRows) {
    const BenchTimes& times = summary.*row.times;
    json[fmt::format("mean_{}_ms", row.key)] = absl::ToDoubleMilliseconds(times.mean);
    json[fmt::format("median_{}_ms", row.key)] = absl::ToDoubleMilliseconds(times.median);
    json[fmt::format("p99_{}_ms", row.key)] = absl::ToDoubleMilliseconds(times.p99);
  }
  return json.dump();
}

}  // namespace weft
