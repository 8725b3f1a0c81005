#include "worker/plan/layout_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "fmt/format.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

constexpr std::int32_t kMostRanks = 16;  // that a plan for any T looks at
constexpr std::int64_t kShortContext = 1024;

StepLoad LoadOf(const PlanOptions& options, std::int64_t batch, std::int64_t context) {
  return {.batch = batch,
          .context = context,
          .weight_bytes = options.weight_bytes,
          .kv_bytes = options.kv_bytes,
          .wire_bytes = options.wire_bytes,
          .a2a_exchange = options.a2a_exchange,
          .expert_parallel = options.expert_parallel};
}

// A layout as each of its ranks sees it.
absl::StatusOr<std::vector<ShardLayout>> RanksOf(const ModelConfig& config,
                                                 const PlanOptions& options, std::int32_t tp,
                                                 std::int32_t dcp) {
  std::vector<ShardLayout> ranks;
  for (std::int32_t rank = 0; rank < tp; ++rank) {
    ASSIGN_OR_RETURN(
        const ShardLayout layout,
        ShardLayout::Create(
            {.tensor_parallel_size = tp,
             .decode_context_parallel_size = dcp,
             .block_size = options.block_size,
             .interleave = options.interleave,
             .min_block_size = options.gpu.has_value() ? 256 : 128,
             .replicate_query = options.replicate_query},
            {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, rank));
    ranks.push_back(layout);
  }
  RETURN_IF_ERROR(CheckRanksCanShare(config, ranks[0], options.expert_parallel));
  return ranks;
}

// What fits, of the rank that it is least of.
void FillCapacity(const ModelConfig& config, const PlanOptions& options,
                  absl::Span<const ShardLayout> ranks, LayoutPlan& plan) {
  std::int64_t blocks = std::numeric_limits<std::int64_t>::max();
  for (const ShardLayout& layout : ranks) {
    const auto weights = static_cast<std::int64_t>(
        static_cast<double>(CountWeights(config, layout, options.expert_parallel).total()) *
        options.weight_bytes);
    const double local_bytes =
        static_cast<double>(KvElementsPerToken(config, layout)) * options.kv_bytes;
    const std::int64_t memory =
        std::max<std::int64_t>(0, options.memory_bytes.has_value() ? *options.memory_bytes - weights
                                                                   : options.kv_memory_bytes);
    const auto fitting = static_cast<std::int64_t>(static_cast<double>(memory) /
                                                   (local_bytes * layout.block_tokens_per_rank()));
    if (fitting < blocks) {
      blocks = fitting;
      plan.kv_memory_bytes = memory;
    }
    plan.kv_bytes_per_token_per_rank = std::max(
        plan.kv_bytes_per_token_per_rank, local_bytes / layout.decode_context_parallel_size());
    plan.weight_bytes_per_rank = std::max(plan.weight_bytes_per_rank, weights);
  }
  plan.kv_tokens = blocks * plan.block_size;
  plan.max_sequences = blocks / CeilDiv(plan.context, plan.block_size);
  plan.batch = std::clamp<std::int64_t>(plan.max_sequences, 1, options.max_num_seqs);
}

double SingleStep(const ModelConfig& config, const PlanOptions& options, const ShardLayout& layout,
                  std::int64_t context) {
  return EstimateStep(config, layout, LoadOf(options, 1, context), *options.gpu).total();
}

void FillEstimates(const ModelConfig& config, const PlanOptions& options, const ShardLayout& layout,
                   const ShardLayout& alone, LayoutPlan& plan) {
  plan.step = EstimateStep(config, layout, LoadOf(options, plan.batch, plan.context), *options.gpu);
  if (plan.max_sequences > 0) {
    plan.tokens_per_second = static_cast<double>(plan.batch) / plan.step->total();
  }
  if (layout.decode_context_parallel_size() == 1) return;
  const auto slowdown = [&](std::int64_t context) {
    return SingleStep(config, options, layout, context) /
           SingleStep(config, options, alone, context);
  };
  plan.single_slowdown = slowdown(plan.context);
  plan.short_slowdown = slowdown(kShortContext);
  for (std::int64_t context = 128; context <= std::int64_t{1} << 24; context *= 2) {
    if (slowdown(context) > 1) continue;
    plan.break_even_context = context;
    break;
  }
}

std::string NoteOf(const ModelConfig& config, const PlanOptions& options, const ShardLayout& layout,
                   const LayoutPlan& plan) {
  if (plan.kv_tokens == 0 && options.memory_bytes.has_value()) {
    return fmt::format("does not fit: {:.1f} GiB of weights on a rank",
                       static_cast<double>(plan.weight_bytes_per_rank) / (1 << 30));
  }
  if (plan.context > config.max_position_embeddings) {
    return fmt::format("this model has positions for {} tokens only",
                       config.max_position_embeddings);
  }
  if (layout.decode_context_parallel_size() > LargestUsefulDcp(layout, config)) {
    return "saves no memory over a smaller N: no copies left to remove";
  }
  return "";
}

absl::Status AddLayout(const ModelConfig& config, const PlanOptions& options, std::int32_t tp,
                       std::int32_t dcp, std::vector<LayoutPlan>& plans) {
  ASSIGN_OR_RETURN(const std::vector<ShardLayout> ranks, RanksOf(config, options, tp, dcp));
  ASSIGN_OR_RETURN(const std::vector<ShardLayout> alone, RanksOf(config, options, tp, 1));
  for (const std::int64_t context : options.contexts) {
    LayoutPlan plan{.tensor_parallel_size = tp,
                    .decode_context_parallel_size = dcp,
                    .block_size = ranks[0].block_size(),
                    .interleave = ranks[0].interleave(),
                    .context = context,
                    .kv_copies = ranks[0].KvCopies()};
    FillCapacity(config, options, ranks, plan);
    plan.dcp_wire_bytes_per_layer = static_cast<std::int64_t>(
        DcpWireBytes(config, ranks[0], LoadOf(options, plan.batch, context)));
    if (options.gpu.has_value()) FillEstimates(config, options, ranks[0], alone[0], plan);
    plan.note = NoteOf(config, options, ranks[0], plan);
    plans.push_back(std::move(plan));
  }
  return absl::OkStatus();
}

std::vector<std::int32_t> SizesUpTo(std::optional<std::int32_t> asked, std::int32_t most) {
  if (asked.has_value()) return {*asked};
  std::vector<std::int32_t> sizes;
  for (std::int32_t size = 1; size <= most; size *= 2) sizes.push_back(size);
  return sizes;
}

}  // namespace

std::optional<double> StorageBytes(std::string_view dtype) {
  if (dtype == "float32") return 4;
  if (dtype == "bfloat16" || dtype == "float16") return 2;
  if (dtype == "fp8") return 1;
  if (dtype == "nvfp4") return 0.5625;  // 4 bits, and 8 for each 16 of them
  return std::nullopt;
}

absl::StatusOr<std::vector<LayoutPlan>> PlanLayouts(const ModelConfig& config,
                                                    const PlanOptions& options) {
  const std::optional<std::int32_t> n = options.decode_context_parallel_size;
  std::vector<LayoutPlan> plans;
  absl::Status first_error;
  for (std::int32_t tp : SizesUpTo(options.tensor_parallel_size, kMostRanks)) {
    for (std::int32_t dcp = n.value_or(1); dcp <= n.value_or(tp); ++dcp) {
      if (!n.has_value() && tp % dcp != 0) continue;
      first_error.Update(AddLayout(config, options, tp, dcp, plans));
    }
  }
  // Some of all layouts may not do; none at all is an error.
  if (plans.empty()) return first_error;
  return plans;
}

std::string Recommend(absl::Span<LayoutPlan> plans) {
  std::int64_t longest = 0;
  for (const LayoutPlan& plan : plans) longest = std::max(longest, plan.context);
  const auto gain = [](const LayoutPlan& plan) {
    return plan.tokens_per_second.value_or(static_cast<double>(plan.max_sequences)) /
           plan.tensor_parallel_size;
  };
  LayoutPlan* best = nullptr;
  for (LayoutPlan& plan : plans) {
    if (plan.context != longest || plan.max_sequences == 0) continue;
    // By less than the estimates' own error is no gain.
    if (best == nullptr || gain(plan) > 1.02 * gain(*best)) best = &plan;
  }
  if (best == nullptr) return fmt::format("nothing: no layout holds {} tokens", longest);
  best->recommended = true;
  const std::string why =
      best->tokens_per_second.has_value()
          ? fmt::format("an estimated {:.0f} tokens per second and rank at {} sequences",
                        gain(*best), best->batch)
          : fmt::format("{} sequences of {} tokens, {:.1f} per rank", best->max_sequences, longest,
                        gain(*best));
  return fmt::format("T={} N={}: {}; no other layout here has more", best->tensor_parallel_size,
                     best->decode_context_parallel_size, why);
}

}  // namespace weft
