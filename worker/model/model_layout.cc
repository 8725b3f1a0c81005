#include "worker/model/model_layout.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "fmt/format.h"
#include "kernels/attention.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// Of the attention of a layer.
std::int64_t CountAttention(const ModelConfig& c, const ShardLayout& layout) {
  const std::int64_t hidden = c.hidden_size;
  const std::int64_t own = layout.QHeads().size();
  const std::int64_t projected = layout.ProjectedQHeads().size();
  const bool first = layout.rank() == 0;
  const std::int64_t o_bias = c.o_bias && first ? hidden : 0;
  if (!c.mla.has_value()) {
    const std::int64_t q = projected * c.head_dim;
    const std::int64_t kv = std::int64_t{2} * layout.GroupKvHeads().size() * c.head_dim;
    return (q + kv) * (hidden + (c.qkv_bias ? 1 : 0)) + own * c.head_dim * hidden + o_bias +
           (c.qk_norm ? 2 * c.head_dim : 0);
  }
  const MlaConfig& mla = *c.mla;
  const std::int64_t bias = c.o_bias ? 1 : 0;
  const std::int64_t lora = mla.q_lora_rank;
  const std::int64_t values =
      MergedDim(c, layout) < c.value_dim ? layout.GroupQHeads().size() : own;
  const std::int64_t latent = mla.kv_lora_rank;
  return lora * (hidden + 1 + bias) +
         projected * mla.qk_head_dim() * (lora > 0 ? lora : hidden) +  // queries
         c.head_dim * (hidden + bias) + latent +                       // the latent
         (projected + (CanDecompress(c) ? own : 0)) * mla.qk_nope_head_dim * latent +
         values * mla.v_head_dim * latent + own * mla.v_head_dim * hidden + o_bias;
}

// Of an MLP that ranks share by width; `bias` also of the rank's part of gate and up, and of down
// on the first rank.
std::int64_t CountMlp(const ModelConfig& c, const ShardLayout& layout, std::int32_t width,
                      bool bias) {
  const std::int64_t own = layout.Slice(width).size();
  return 3 * own * c.hidden_size + (bias ? 2 * own + (layout.rank() == 0 ? c.hidden_size : 0) : 0);
}

}  // namespace

absl::Status CheckRanksCanShare(const ModelConfig& config, const ShardLayout& layout,
                                bool expert_parallel) {
  const std::int32_t tp = layout.tensor_parallel_size();
  struct Dimension {
    std::string_view key;
    std::int32_t size;
  };
  std::vector<Dimension> dimensions = {{"vocab_size", config.vocab_size}};
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.HasExperts(layer)) continue;
    dimensions.push_back({"intermediate_size", config.intermediate_size});
    break;
  }
  if (config.moe.has_value()) {
    const MoeConfig& moe = *config.moe;
    dimensions.push_back(expert_parallel ? Dimension{"the number of experts", moe.num_experts}
                                         : Dimension{"an expert's width", moe.intermediate_size});
    if (moe.shared_intermediate_size > 0) {
      dimensions.push_back({"the shared experts' width", moe.shared_intermediate_size});
    }
  } else if (expert_parallel) {
    return absl::InvalidArgumentError(
        fmt::format("--enable-expert-parallel is set, but {} has no experts", config.architecture));
  }
  for (const Dimension& dimension : dimensions) {
    if (dimension.size >= tp) continue;
    return absl::InvalidArgumentError(fmt::format(
        "--tensor-parallel-size is {}; {} of this model is {}, so at most as many ranks "
        "can share it",
        tp, dimension.key, dimension.size));
  }
  return absl::OkStatus();
}

absl::Status CheckQuantGroups(const ModelConfig& config, const ShardLayout& layout,
                              bool expert_parallel) {
  const auto check = [](std::string_view what, std::int32_t end, std::int32_t size) {
    if (end == size || end % kQuantGroup == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format(
        "--quantization takes groups of {} inputs; a rank's share of {} would end at {} of {}: "
        "choose another --tensor-parallel-size",
        kQuantGroup, what, end, size));
  };
  const auto check_width = [&](std::string_view what, std::int32_t width, std::int32_t rank) {
    return check(what, layout.Slice(width, rank).end, width);
  };
  const std::int32_t value_dim = config.mla.has_value() ? config.mla->v_head_dim : config.value_dim;
  for (std::int32_t rank = 0; rank < layout.tensor_parallel_size(); ++rank) {
    RETURN_IF_ERROR(check("the heads' values", layout.QHeads(rank).end * value_dim,
                          config.num_q_heads * value_dim));
    RETURN_IF_ERROR(check_width("intermediate_size", config.intermediate_size, rank));
    if (!config.moe.has_value()) continue;
    RETURN_IF_ERROR(
        check_width("the shared experts' width", config.moe->shared_intermediate_size, rank));
    if (expert_parallel) continue;
    RETURN_IF_ERROR(check_width("an expert's width", config.moe->intermediate_size, rank));
  }
  return absl::OkStatus();
}

std::int32_t MergedDim(const ModelConfig& config, const ShardLayout& layout) {
  const bool alone = layout.decode_context_parallel_size() == 1;
  return alone || !config.mla.has_value() ? config.value_dim
                                          : std::min(config.value_dim, config.mla->v_head_dim);
}

std::int32_t DecompressedDim(const MlaConfig& mla) {
  return CeilDiv(std::max(mla.qk_head_dim(), mla.v_head_dim), 8) * 8;
}

bool CanDecompress(const ModelConfig& config) {
  return config.mla.has_value() && DecompressedDim(*config.mla) <= kernels::kMaxHeadDim;
}

std::int64_t KvElementsPerToken(const ModelConfig& config, const ShardLayout& layout) {
  const std::int32_t dims = config.head_dim + (config.mla.has_value() ? 0 : config.value_dim);
  return std::int64_t{config.num_layers} * layout.GroupKvHeads().size() * dims;
}

WeightCount CountWeights(const ModelConfig& config, const ShardLayout& layout,
                         bool expert_parallel) {
  const std::int64_t hidden = config.hidden_size;
  WeightCount count;
  count.always =
      layout.Slice(config.vocab_size).size() * hidden * (config.tie_word_embeddings ? 1 : 2) +
      hidden;
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    count.always += 2 * hidden + CountAttention(config, layout);
    if (!config.HasExperts(layer)) {
      count.always += CountMlp(config, layout, config.intermediate_size, config.mlp_bias);
      continue;
    }
    const MoeConfig& moe = *config.moe;
    count.always += moe.num_experts * (hidden + (moe.score_bias ? 1 : 0));
    if (moe.shared_intermediate_size > 0) {
      count.always += CountMlp(config, layout, moe.shared_intermediate_size, config.mlp_bias);
    }
    const std::int64_t experts =
        expert_parallel ? layout.Slice(moe.num_experts).size() : moe.num_experts;
    const std::int64_t width =
        expert_parallel ? moe.intermediate_size : layout.Slice(moe.intermediate_size).size();
    count.experts += 3 * experts * width * hidden;
  }
  return count;
}

std::int64_t ReplicatedQueryWeights(const ModelConfig& config, const ShardLayout& layout) {
  const std::int64_t others = layout.ProjectedQHeads().size() - layout.QHeads().size();
  std::int64_t of_head =
      std::int64_t{config.head_dim} * (config.hidden_size + (config.qkv_bias ? 1 : 0));
  if (config.mla.has_value()) {
    const MlaConfig& mla = *config.mla;
    const std::int64_t from = mla.q_lora_rank > 0 ? mla.q_lora_rank : config.hidden_size;
    of_head = mla.qk_head_dim() * from + std::int64_t{mla.qk_nope_head_dim} * mla.kv_lora_rank;
  }
  return config.num_layers * others * of_head;
}

std::int32_t LargestUsefulDcp(const ShardLayout& layout, const ModelConfig& config) {
  std::int32_t useful = 1;
  double copies = 0;
  for (std::int32_t n = 1; n <= layout.tensor_parallel_size(); ++n) {
    const absl::StatusOr<ShardLayout> other = ShardLayout::Create(
        {.tensor_parallel_size = layout.tensor_parallel_size(), .decode_context_parallel_size = n},
        {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, 0);
    if (!other.ok()) continue;  // n does not divide T
    if (n > 1 && other->KvCopies() >= copies) continue;
    copies = other->KvCopies();
    useful = n;
  }
  return useful;
}

std::string LayoutNote(const ShardLayout& layout, const ModelConfig& config) {
  const std::int32_t n = layout.decode_context_parallel_size();
  const std::int32_t useful = LargestUsefulDcp(layout, config);
  if (n > useful) {
    return fmt::format(
        "decode_context_parallel_size above {} removes no further copy of this model's KV: it "
        "evens the shards out and adds collectives, but saves no memory",
        useful);
  }
  if (n == useful) return "";
  return fmt::format(
      "each KV entry is stored {:.2f} times; decode_context_parallel_size up to {} removes copies",
      layout.KvCopies(), useful);
}

}  // namespace weft
