#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "worker/engine/kv_report.h"
#include "worker/model/kv_cache.h"
#include "worker/model/rank_model.h"
#include "worker/model/shard_layout.h"

namespace weft {

// The rank whose KV is moved.
struct KvRank {
  const KvCache* cache = nullptr;
  std::vector<ShardLayout> group;  // of all ranks of its group
  std::int32_t rank = 0;
  LayoutOptions layout;  // what `group` was made of, all of it given
  HeadCounts heads;
  std::string format;  // of the KV: both sides have to say the same

  const ShardLayout& own() const { return group[rank]; }
};

// What is to be equal on both sides, for people, too: checkpoint, dtypes, and the shape of the KV.
std::string KvFormatOf(const RankModel& model);
KvRank KvRankOf(const RankModel& model, const KvCache& cache);

struct KvMoverOptions {
  bool layerwise = true;                   // else whole blocks, when their step has run
  std::int64_t message_bytes = 256 << 10;  // of a message, about
  std::int64_t staging_bytes = 4 << 20;    // of messages that are being sent
  std::int64_t window_bytes = 2 << 20;     // sent to one peer and not yet taken
  bool checksum = false;                   // of every message
  bool shared_memory = true;               // see shared_memory.h
  std::int64_t bandwidth_limit = 0;        // bytes a second that this rank sends; 0: none
  absl::Duration min_backoff = absl::Milliseconds(100);  // before a lost peer is tried again
  absl::Duration max_backoff = absl::Seconds(2);
};

struct KvCounters {
  std::int64_t sent_bytes = 0;
  std::vector<std::int64_t> sent_to;  // likewise, by the rank of the other group
  std::int64_t overlapped_bytes = 0;  // of these, sent while the request's prompt was computed
  std::int64_t received_bytes = 0;
  std::vector<std::int64_t> received_from;
  std::int64_t read_bytes = 0;        // of these, out of the sender's memory
  std::int64_t dropped_messages = 0;  // of transfers that were not known any more
  std::int64_t failed_peer = 0;       // transfers: the peer was lost or refused
  std::int64_t failed_rejected = 0;   // the other side had given up
  std::int64_t failed_rows = 0;       // what came was wrong
  std::int32_t sending = 0;           // transfers now
  std::int32_t receiving = 0;
  std::int32_t peers = 0;  // ranks of other groups that are remembered, of either side
};

}  // namespace weft
