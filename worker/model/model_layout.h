#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "worker/model/model_config.h"
#include "worker/model/shard_layout.h"

// What a layout makes of a model: who shares what, and what it costs and saves.

namespace weft {

// INVALID_ARGUMENT when T is larger than a dimension that the ranks divide; with `expert_parallel`
// they share out whole experts, else each expert's width.
absl::Status CheckRanksCanShare(const ModelConfig& config, const ShardLayout& layout,
                                bool expert_parallel);

// INVALID_ARGUMENT when a rank's share of a dimension that is summed over would end within a group
// of integer weights (kQuantGroup): ranks quantize what they hold, a group that is cut in two would
// have two scales, and the layout would change the answer.
absl::Status CheckQuantGroups(const ModelConfig& config, const ShardLayout& layout,
                              bool expert_parallel);

// How many floats of each head's output the ranks of a DCP group exchange: those that attention
// sums, or the fewer that MLA projects them to. Then a rank projects what it has of all the group's
// heads.
std::int32_t MergedDim(const ModelConfig& config, const ShardLayout& layout);

// The width of K and of V of a head that MLA has decompressed, padded to one that the kernels take;
// and whether they have room for it.
std::int32_t DecompressedDim(const MlaConfig& mla);
bool CanDecompress(const ModelConfig& config);

// Elements of KV, all layers, of a token that this rank stores.
std::int64_t KvElementsPerToken(const ModelConfig& config, const ShardLayout& layout);

// Weights of this rank, biases and norms among them.
struct WeightCount {
  std::int64_t always = 0;   // read by every step
  std::int64_t experts = 0;  // of routed experts: of a token's, experts_per_token / num_experts
  std::int64_t total() const { return always + experts; }
};
WeightCount CountWeights(const ModelConfig& config, const ShardLayout& layout,
                         bool expert_parallel);

// Of them, those that --dcp-replicate-query adds.
std::int64_t ReplicatedQueryWeights(const ModelConfig& config, const ShardLayout& layout);

// The largest N that still removes copies, with this layout's T.
std::int32_t LargestUsefulDcp(const ShardLayout& layout, const ModelConfig& config);

// What another N would do better, for people; empty if none would.
std::string LayoutNote(const ShardLayout& layout, const ModelConfig& config);

}  // namespace weft
