#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "server/metrics.h"
#include "worker/leader.h"
#include "worker/model/shard_layout.h"
#include "worker/rank.h"

namespace weft {

// What a scrape reads of a rank. Both outlive the result.
std::unique_ptr<MetricRegistry::Reader> ReadRank(MetricRegistry& registry, const Rank& rank,
                                                 const Progress& progress, std::int32_t rank_index,
                                                 std::int64_t weight_bytes);

// What a scrape reads of the leader's engine and streams. All outlive the result.
std::unique_ptr<MetricRegistry::Reader> ReadLeader(
    MetricRegistry& registry, const Leader& leader, const ShardLayout& layout,
    std::function<std::int64_t()> stream_buffer_bytes);

}  // namespace weft
