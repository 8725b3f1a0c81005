#include "router/simulate.h"

#include <algorithm>
#include <deque>
#include <list>
#include <optional>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "fmt/format.h"
#include "router/text/json_cursor.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

absl::StatusOr<std::int64_t> Count(const nlohmann::json& line, const char* key, std::int64_t min) {
  const auto it = line.find(key);
  if (it == line.end() || !it->is_number_integer() || it->get<std::int64_t>() < min) {
    return absl::InvalidArgumentError(fmt::format("{} is {}; a whole number from {} on is needed",
                                                  key, it == line.end() ? "missing" : it->dump(),
                                                  min));
  }
  return it->get<std::int64_t>();
}

absl::StatusOr<TraceRequest> ParseLine(std::string_view text) {
  ASSIGN_OR_RETURN(const nlohmann::json line, ParseTextJson(text, "request"));
  if (!line.is_object()) return absl::InvalidArgumentError("not a JSON object");
  TraceRequest request;
  ASSIGN_OR_RETURN(const std::int64_t milliseconds, Count(line, "timestamp", 0));
  request.arrival = static_cast<double>(milliseconds) / 1000;
  ASSIGN_OR_RETURN(request.input_tokens, Count(line, "input_length", 1));
  ASSIGN_OR_RETURN(request.output_tokens, Count(line, "output_length", 1));
  const auto ids = line.find("hash_ids");
  if (ids == line.end() || !ids->is_array()) {
    return absl::InvalidArgumentError("hash_ids is missing or no list");
  }
  for (const nlohmann::json& id : *ids) {
    if (!id.is_number_integer()) {
      return absl::InvalidArgumentError(fmt::format("hash_ids has {}, no whole number", id.dump()));
    }
    request.blocks.push_back(id.get<std::int64_t>());
  }
  return request;
}

// What is in a group's prefix cache, now and as its router has heard of it.
class Cache {
 public:
  explicit Cache(std::int64_t capacity) : capacity_(static_cast<std::size_t>(capacity)) {}

  // The first blocks that are there, which are used now.
  std::int64_t Use(absl::Span<const std::int64_t> blocks) {
    const auto end = std::find_if(blocks.begin(), blocks.end(),
                                  [this](std::int64_t id) { return !places_.contains(id); });
    for (auto it = end; it != blocks.begin();) {  // so that the last one of a prefix goes first
      recent_.splice(recent_.begin(), recent_, places_[*--it]);
    }
    return end - blocks.begin();
  }

  // They are computed and kept, which the router hears at `when`.
  void Keep(absl::Span<const std::int64_t> blocks, double when) {
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
      if (places_.contains(*it)) continue;
      recent_.push_front(*it);
      places_[*it] = recent_.begin();
      news_.push_back({when, *it, true});
      if (recent_.size() <= capacity_) continue;
      news_.push_back({when, recent_.back(), false});
      places_.erase(recent_.back());
      recent_.pop_back();
    }
  }

  // As Use(), of what the router knows at `now`.
  std::int64_t Known(absl::Span<const std::int64_t> blocks, double now) {
    for (; !news_.empty() && news_.front().when <= now; news_.pop_front()) {
      if (news_.front().kept) {
        known_.insert(news_.front().block);
      } else {
        known_.erase(news_.front().block);
      }
    }
    const auto end = std::find_if(blocks.begin(), blocks.end(),
                                  [this](std::int64_t id) { return !known_.contains(id); });
    return end - blocks.begin();
  }

 private:
  struct News {
    double when;
    std::int64_t block;
    bool kept;
  };
  const std::size_t capacity_;
  std::list<std::int64_t> recent_;  // the most recently used first
  absl::flat_hash_map<std::int64_t, std::list<std::int64_t>::iterator> places_;
  std::deque<News> news_;
  absl::flat_hash_set<std::int64_t> known_;
};

// Amounts that end at a time of their own.
class Pending {
 public:
  void Add(double until, std::int64_t amount) {
    total_ += amount;
    ends_.push({until, amount});
  }
  std::int64_t At(double now) {
    for (; !ends_.empty() && ends_.top().first <= now; ends_.pop()) total_ -= ends_.top().second;
    return total_;
  }

 private:
  using End = std::pair<double, std::int64_t>;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
  std::int64_t total_ = 0;
};

struct Group {
  Cache cache;
  double prefill_free_at = 0;
  Pending requests;
  Pending prefill_tokens;
  std::int64_t placed = 0;
};

double Percentile(std::vector<double>& values, double share) {
  const auto at = static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

}  // namespace

absl::StatusOr<std::vector<TraceRequest>> ParseTrace(std::string_view text) {
  std::vector<TraceRequest> requests;
  int number = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    absl::StatusOr<TraceRequest> request = ParseLine(line);
    if (!request.ok()) {
      return absl::InvalidArgumentError(
          fmt::format("line {}: {}", number, std::string(request.status().message())));
    }
    requests.push_back(*std::move(request));
  }
  if (requests.empty()) return absl::InvalidArgumentError("there is no request in it");
  std::stable_sort(requests.begin(), requests.end(),
                   [](const auto& a, const auto& b) { return a.arrival < b.arrival; });
  return requests;
}

SimulationResult Simulate(absl::Span<const TraceRequest> requests, const SimulatedGroups& options,
                          Policy policy) {
  std::vector<Group> groups;
  for (std::int32_t i = 0; i < options.count; ++i) {
    groups.push_back({.cache = Cache(options.num_blocks), .requests = {}, .prefill_tokens = {}});
  }
  std::vector<double> ttft;
  std::vector<double> latency;
  std::int64_t input_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::vector<GroupLoad> loads(groups.size());
  for (const TraceRequest& request : requests) {
    const double now = request.arrival;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      loads[i] = {.ready = true,
                  .max_prompt_tokens = request.input_tokens,
                  .requests = groups[i].requests.At(now),
                  .cached_tokens =
                      std::min(request.input_tokens,
                               options.block_size * groups[i].cache.Known(request.blocks, now)),
                  .prefill_tokens = groups[i].prefill_tokens.At(now)};
    }
    const std::size_t chosen = *policy.Pick(loads, request.input_tokens);
    Group& group = groups[chosen];
    ++group.placed;
    // Prompts are computed in the order in which they come, so that what earlier ones leave in the
    // cache is there. The last token is always computed.
    const std::int64_t cached =
        std::min(request.input_tokens - 1, options.block_size * group.cache.Use(request.blocks));
    const double first_token =
        std::max(now, group.prefill_free_at) +
        static_cast<double>(request.input_tokens - cached) / options.prefill_tokens_per_second;
    const double last_token =
        first_token + static_cast<double>(request.output_tokens - 1) * options.seconds_per_token;
    group.prefill_free_at = first_token;
    group.cache.Keep(request.blocks, first_token);
    group.requests.Add(last_token, 1);
    group.prefill_tokens.Add(first_token, request.input_tokens - loads[chosen].cached_tokens);
    input_tokens += request.input_tokens;
    cached_tokens += cached;
    ttft.push_back(first_token - now);
    latency.push_back(last_token - now);
  }
  const auto busiest =
      std::max_element(groups.begin(), groups.end(),
                       [](const auto& a, const auto& b) { return a.placed < b.placed; });
  return {.cached = static_cast<double>(cached_tokens) / static_cast<double>(input_tokens),
          .ttft_p50 = Percentile(ttft, 0.5),
          .ttft_p99 = Percentile(ttft, 0.99),
          .latency_p50 = Percentile(latency, 0.5),
          .latency_p99 = Percentile(latency, 0.99),
          .busiest = static_cast<double>(busiest->placed) / static_cast<double>(requests.size())};
}

std::string SimulationReport(absl::Span<const TraceRequest> requests, const SimulatedGroups& groups,
                             std::int64_t request_tokens) {
  std::string report = fmt::format(
      "{} requests over {:.0f} s, {} groups of {} blocks of {} tokens\n"
      "{:<14}{:>8}{:>12}{:>12}{:>14}{:>14}{:>10}\n",
      requests.size(), requests.back().arrival - requests.front().arrival, groups.count,
      groups.num_blocks, groups.block_size, "policy", "cached", "TTFT p50 s", "TTFT p99 s",
      "latency p50 s", "latency p99 s", "busiest");
  for (const auto& [policy, name] : kRoutingPolicyNames) {
    const SimulationResult r = Simulate(requests, groups, Policy(policy, request_tokens));
    report += fmt::format("{:<14}{:>7.1f}%{:>12.3f}{:>12.3f}{:>14.3f}{:>14.3f}{:>9.1f}%\n", name,
                          100 * r.cached, r.ttft_p50, r.ttft_p99, r.latency_p50, r.latency_p99,
                          100 * r.busiest);
  }
  return report;
}

}  // namespace weft
