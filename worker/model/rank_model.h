#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "kernels/dtype.h"
#include "worker/model/dcp_attention.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_config.h"
#include "worker/model/shard_layout.h"

namespace weft {

struct RankModelOptions {
  std::filesystem::path model_dir;
  LayoutOptions layout;
  Device device = Device::kCpu;
  std::vector<Feature> features;  // that are asked for; the capability table says what is refused
  std::int32_t rank = 0;
  std::optional<DType> dtype;                // absent: the checkpoint's
  std::optional<WeightFormat> quantization;  // int8 or int4, of the large weights
  std::optional<DType> kv_cache_dtype;  // absent: the weights', on the CPU float16 unless float32
  std::optional<std::int64_t> max_model_len;  // absent: auto
  std::int32_t max_num_seqs = 64;
  std::int32_t max_num_batched_tokens = 256;
  DcpExchange exchange = DcpExchange::kAgRs;
  bool expert_parallel = false;  // ranks share out whole experts, not each one's width
  // KV budget of this rank, the first that is given: blocks, bytes, or the default: the least of
  // 2 GiB, max_num_seqs sequences of max_model_len, and this rank's share of 60 % of the machine's
  // available memory (or cgroup limit) less weights and workspace. On a GPU: of the latter two, of
  // 90 % of what is free there.
  std::optional<std::int32_t> num_blocks;
  std::optional<std::int64_t> kv_cache_memory_bytes;
  std::int32_t local_ranks = 1;  // ranks that share this machine's memory
};

// What a rank knows before it has joined its group: the model, its place in the layout, its weights
// and how much KV it has room for.
struct RankModel {
  ModelConfig config;
  ShardLayout layout;
  DecoderWeights weights;
  DType dtype = DType::kFloat32;
  WeightFormat weight_format = WeightFormat::kFloat32;  // of most weights
  KvCacheShape kv_shape;
  std::int32_t num_blocks = 0;    // that this rank's budget holds; the group uses the minimum
  std::uint64_t fingerprint = 0;  // of the checkpoint
  // For people: what is experimental, and what this layout does not buy.
  std::vector<std::string> warnings;

  // What can be checked before weights are read: config, layout, lengths, every tensor's shape. A
  // supervisor asks before it starts ranks, so that a mistake is one line and not one per rank.
  // Errors are for the user: they name the flag or file, what was seen, and what is allowed.
  static absl::Status Check(const RankModelOptions& options);

  // Check(), then reads the weights. `on_layer(done, of)` reports progress.
  static absl::StatusOr<RankModel> Load(const RankModelOptions& options, kernels::Stream& stream,
                                        const std::function<void(int done, int of)>& on_layer);

  // The sequence length that `group_blocks` blocks allow. INVALID_ARGUMENT, with the numbers, when
  // an explicit --max-model-len exceeds the model's positions or does not fit.
  absl::StatusOr<std::int64_t> ResolveMaxModelLen(std::optional<std::int64_t> asked,
                                                  std::int32_t group_blocks) const;

  // Everything that must be equal on all ranks, as text: the join compares it.
  std::string Agreement(const RankModelOptions& options) const;

  // For people, a few lines: layout, KV bytes per token and rank, copies, what fits.
  std::string Summary(std::int32_t group_blocks, std::int64_t max_model_len) const;
};

}  // namespace weft
