#include "worker/rank_metrics.h"

#include <string>
#include <utility>
#include <vector>

namespace weft {
namespace {

void ReadKvMover(const KvMover& mover, const std::string& rank, MetricReadings& readings) {
  const KvCounters counters = mover.counters();
  const auto set = [&](const auto& spec, std::int64_t value, const char* label, const char* is) {
    readings.Set(spec, static_cast<double>(value), {{"rank", rank}, {label, is}});
  };
  const auto set_bytes = [&](const char* direction, std::vector<std::int64_t> by_peer) {
    if (by_peer.empty()) by_peer.push_back(0);
    for (std::size_t peer = 0; peer < by_peer.size(); ++peer) {
      readings.Set(metrics::kKvTransferBytes, static_cast<double>(by_peer[peer]),
                   {{"rank", rank}, {"direction", direction}, {"peer_rank", std::to_string(peer)}});
    }
  };
  set_bytes("sent", counters.sent_to);
  set_bytes("received", counters.received_from);
  set(metrics::kKvTransferInflight, counters.sending, "direction", "sent");
  set(metrics::kKvTransferInflight, counters.receiving, "direction", "received");
  set(metrics::kKvTransferFailed, counters.failed_peer, "reason", "peer");
  set(metrics::kKvTransferFailed, counters.failed_rejected, "reason", "rejected");
  set(metrics::kKvTransferFailed, counters.failed_rows, "reason", "rows");
  readings.Set(metrics::kKvTransferOverlappedBytes, static_cast<double>(counters.overlapped_bytes),
               {{"rank", rank}});
  readings.Set(metrics::kKvTransferDroppedMessages, static_cast<double>(counters.dropped_messages),
               {{"rank", rank}});
}

}  // namespace

std::unique_ptr<MetricRegistry::Reader> ReadRank(MetricRegistry& registry, const Rank& rank,
                                                 const Progress& progress, std::int32_t rank_index,
                                                 std::int64_t weight_bytes) {
  const std::string index = std::to_string(rank_index);
  return registry.AddReader([&rank, &progress, index, weight_bytes](MetricReadings& readings) {
    const auto set = [&](const auto& spec, auto value) {
      readings.Set(spec, static_cast<double>(value), {{"rank", index}});
    };
    const RankCounters counters = rank.counters();
    set(metrics::kRankStepId, progress.steps());
    set(metrics::kRankStepSeconds, absl::ToDoubleSeconds(progress.step_time()));
    set(metrics::kRankLastProgress,
        absl::ToDoubleSeconds(progress.last_progress() - absl::UnixEpoch()));
    set(metrics::kRankCollectiveWait, absl::ToDoubleSeconds(counters.collective_wait));
    set(metrics::kRankCollectiveReceivedBytes, counters.collective_received_bytes);
    set(metrics::kRankFabricSentBytes, counters.fabric.sent_bytes);
    set(metrics::kRankFabricReceivedBytes, counters.fabric.received_bytes);
    if (rank.kv_mover() != nullptr) ReadKvMover(*rank.kv_mover(), index, readings);
    for (const auto& [kind, bytes] : {std::pair{"weights", weight_bytes},
                                      {"kv", rank.kv_bytes()},
                                      {"workspace", rank.workspace_bytes()}}) {
      readings.Set(metrics::kRankMemory, static_cast<double>(bytes),
                   {{"rank", index}, {"kind", kind}});
    }
  });
}

std::unique_ptr<MetricRegistry::Reader> ReadLeader(
    MetricRegistry& registry, const Leader& leader, const ShardLayout& layout,
    std::function<std::int64_t()> stream_buffer_bytes) {
  return registry.AddReader(
      [&leader, &layout,
       stream_buffer_bytes = std::move(stream_buffer_bytes)](MetricReadings& readings) {
        const auto set = [&](const auto& spec, auto value) {
          readings.Set(spec, static_cast<double>(value));
        };
        const EngineStats stats = leader.Stats();
        set(metrics::kNumRequestsRunning, stats.num_running);
        set(metrics::kNumRequestsWaiting, stats.num_waiting);
        set(metrics::kKvCacheUsageRatio,
            1 - static_cast<double>(stats.num_free_blocks) / stats.num_blocks);
        set(metrics::kNumPreemptions, stats.num_preemptions);
        set(metrics::kPrefixCacheQueries, stats.prefix_cache_queries);
        set(metrics::kPrefixCacheHits, stats.prefix_cache_hits);
        set(metrics::kPrefixCacheEvictions, stats.prefix_cache_evictions);
        set(metrics::kKvTransferExpired, stats.kv_expired);
        set(metrics::kPromptTokens, stats.prompt_tokens);
        set(metrics::kGenerationTokens, stats.generation_tokens);
        set(metrics::kStreamBufferBytes, stream_buffer_bytes());

        const std::vector<std::int64_t> lengths = leader.KvLengths();
        for (std::int32_t rank = 0; rank < layout.tensor_parallel_size(); ++rank) {
          std::int64_t tokens = 0;
          for (const std::int64_t length : lengths) {
            tokens += layout.LocalLength(length, rank % layout.decode_context_parallel_size());
          }
          readings.Set(metrics::kRankKvTokens, static_cast<double>(tokens),
                       {{"rank", std::to_string(rank)}});
        }
      });
}

}  // namespace weft
