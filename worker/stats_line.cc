#include "worker/stats_line.h"

#include <utility>

#include "fmt/format.h"

namespace weft {

std::optional<std::string> StatsLine::Next(const EngineStats& stats, absl::Time now) {
  const double seconds = absl::ToDoubleSeconds(now - std::exchange(last_time_, now));
  const EngineStats before = std::exchange(last_, stats);
  if (stats.steps == before.steps && stats.num_running == 0 && stats.num_waiting == 0) {
    return std::nullopt;
  }
  const auto rate = [seconds](std::uint64_t to, std::uint64_t from) {
    return static_cast<double>(to - from) / seconds;
  };
  const int used = stats.num_blocks - stats.num_free_blocks;
  std::string line = fmt::format(
      "prompt {:.1f} tokens/s, generation {:.1f} tokens/s, {} running, {} waiting, KV cache {:.1f} "
      "%",
      rate(stats.prompt_tokens, before.prompt_tokens),
      rate(stats.generation_tokens, before.generation_tokens), stats.num_running, stats.num_waiting,
      stats.num_blocks == 0 ? 0.0 : 100.0 * used / stats.num_blocks);
  if (const auto queries = stats.prefix_cache_queries - before.prefix_cache_queries; queries > 0) {
    line += fmt::format(
        ", {:.1f} % of prompts cached",
        100.0 * static_cast<double>(stats.prefix_cache_hits - before.prefix_cache_hits) /
            static_cast<double>(queries));
  }
  if (const auto preemptions = stats.num_preemptions - before.num_preemptions; preemptions > 0) {
    line += fmt::format(", {} preemptions", preemptions);
  }
  return line;
}

}  // namespace weft
