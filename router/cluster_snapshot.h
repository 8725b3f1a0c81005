#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/v1/inference.pb.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// One group as it was last heard of. A value: never changed after it is published.
struct GroupSnapshot {
  bool ready = false;
  std::string state;  // for people: "ready", "loading", "unreachable: ..."
  // Grows with every loss of the group: calls of an older epoch are over.
  std::uint64_t epoch = 0;
  v1::GroupInfo info;           // what the leader last said; empty when it never did
  std::int32_t vocab_size = 0;  // 0 when the leader never said
  std::vector<std::int32_t> eos_token_ids;
  std::string block_hash_key;        // of server/block_hash.h; empty without prefix caching
  std::optional<v1::KvEndpoint> kv;  // where it takes KV, if it hands prompts over
  std::int64_t other_requests = 0;   // there, when it was last heard of, from other routers

  // Whether it takes whole requests, and whether it computes prompts for other groups.
  bool Decodes() const { return info.kv_role() != "kv_producer"; }
  bool Prefills() const { return info.kv_role() == "kv_producer" || info.kv_role() == "kv_both"; }
  // Whether a request can be placed there now.
  bool TakesRequests() const { return ready && Decodes(); }
};

// All groups at one moment, in the order of --groups.
struct ClusterSnapshot {
  std::vector<std::shared_ptr<const GroupSnapshot>> groups;

  // Whether a request can be placed: groups that compute prompts for others are not enough.
  bool AnyReady() const {
    return std::any_of(groups.begin(), groups.end(),
                       [](const auto& group) { return group->TakesRequests(); });
  }
};

}  // namespace weft
