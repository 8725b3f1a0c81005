#include "worker/model/rank_model.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "kernels/device/device_limits.h"
#include "kernels/device/device_stream.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"
#include "worker/engine/step_plan.h"
#include "worker/model/checkpoint_check.h"
#include "worker/model/memory_budget.h"
#include "worker/model/safetensors.h"

namespace weft {
namespace {

constexpr std::int64_t kDefaultKvBytes = std::int64_t{2} << 30;
// What a rank needs beside weights and KV, for the default budget only; start-up prints the real
// one.
constexpr std::int64_t kWorkspaceAllowanceBytes = std::int64_t{256} << 20;

// What weights and KV go into.
struct Memory {
  std::int64_t free_bytes;
  std::int32_t num_ranks;  // that share it
  std::int32_t percent;    // that the default budget takes, up to
  std::int64_t most_bytes;
};

absl::StatusOr<Memory> MemoryOf(const RankModelOptions& options, kernels::Stream& stream) {
  kernels::DeviceStream* const device = kernels::OnDevice(stream);
  if (device == nullptr)
    return Memory{AvailableMemoryBytes(), options.local_ranks, 60, kDefaultKvBytes};
  ASSIGN_OR_RETURN(const std::int64_t free_bytes, device->FreeBytes());
  return Memory{free_bytes, 1, 90, free_bytes};
}

absl::StatusOr<std::int32_t> BlocksThatFit(const RankModelOptions& options,
                                           const ModelConfig& config, const ShardLayout& layout,
                                           const KvCacheShape& shape, std::int64_t weight_bytes,
                                           const Memory& memory) {
  const std::int64_t block_bytes = shape.BytesPerBlock();
  // Pages come as they are used: more than there is would be noticed under load only.
  const auto check = [&](std::string_view flag, std::int64_t bytes) -> absl::Status {
    if (bytes / 1024 * memory.num_ranks <= memory.free_bytes / 1024) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("{} asks for {:.2f} GiB of KV cache on each of {} ranks that share a memory; "
                    "{:.2f} GiB are "
                    "free for all of them",
                    flag, static_cast<double>(bytes) / (1 << 30), memory.num_ranks,
                    static_cast<double>(memory.free_bytes) / (1 << 30)));
  };
  if (options.num_blocks.has_value()) {
    RETURN_IF_ERROR(check("--num-gpu-blocks-override", *options.num_blocks * block_bytes));
    return *options.num_blocks;
  }
  const std::int64_t max_model_len = options.max_model_len.value_or(config.max_position_embeddings);
  const std::int64_t blocks_of_all =
      options.max_num_seqs * CeilDiv(max_model_len, layout.block_size());
  std::int64_t budget = 0;
  if (options.kv_cache_memory_bytes.has_value()) {
    budget = *options.kv_cache_memory_bytes;
    RETURN_IF_ERROR(check("--kv-cache-memory-bytes", budget));
  } else {
    const std::int64_t share = memory.free_bytes / 100 * memory.percent / memory.num_ranks;
    budget = std::min({memory.most_bytes, blocks_of_all * block_bytes,
                       share - weight_bytes - kWorkspaceAllowanceBytes});
  }
  const std::int64_t blocks = std::min<std::int64_t>(budget / block_bytes, 1 << 30);
  if (blocks < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "the KV budget of rank {} is {} bytes, less than one block of {} bytes ({} of its tokens); "
        "give --kv-cache-memory-bytes at least that, or a smaller --block-size",
        options.rank, budget, block_bytes, layout.block_tokens_per_rank()));
  }
  return static_cast<std::int32_t>(blocks);
}

// What a rank holds and sends of its DCP group's other heads so that less is exchanged; a line
// each.
std::string ExtraWeights(const ModelConfig& config, const ShardLayout& layout, DType dtype) {
  const std::int64_t others = layout.GroupQHeads().size() - layout.QHeads().size();
  const std::int64_t received = std::int64_t{layout.decode_context_parallel_size() - 1} *
                                layout.PaddedQHeads() * static_cast<std::int64_t>(sizeof(float));
  const auto line = [&](std::string_view what, std::int64_t weights, std::int64_t floats) {
    return fmt::format(
        "{}: projected by every rank of a DCP group for all its heads; {:.1f} MB more weights on "
        "rank {}, {} bytes fewer received per token\n",
        what, static_cast<double>(weights * DTypeBytes(dtype)) / 1e6, layout.rank(),
        config.num_layers * received * floats);
  };
  std::string text;
  if (layout.decode_context_parallel_size() == 1) return text;
  if (!layout.GathersQueries()) {
    text += line("queries", ReplicatedQueryWeights(config, layout), config.head_dim);
  }
  const std::int64_t merged = MergedDim(config, layout);
  if (merged < config.value_dim) {
    text += line("values", config.num_layers * others * merged * config.value_dim,
                 config.value_dim - merged);
  }
  return text;
}

// Refuses what no step could launch, whether steps are recorded at start or not.
absl::Status CheckDeviceKernels(Device device, const ModelConfig& config) {
  struct Limit {
    std::string_view what;
    std::int32_t value;
    std::int32_t most;
  };
  const MlaConfig mla = config.mla.value_or(MlaConfig{});
  const std::int32_t num_experts = config.moe.has_value() ? config.moe->num_experts : 0;
  for (const Limit& limit :
       {Limit{"hidden_size", config.hidden_size, kernels::kMaxDeviceNormSize},
        Limit{"q_lora_rank", mla.q_lora_rank, kernels::kMaxDeviceNormSize},
        Limit{"qk_rope_head_dim", mla.qk_rope_head_dim, kernels::kMaxDeviceRopeDim},
        Limit{"the number of experts", num_experts, kernels::kMaxDeviceExperts}}) {
    if (limit.value <= limit.most) continue;
    return absl::InvalidArgumentError(
        fmt::format("{} is {}; the kernels of --device={} take at most {}, those of --device=cpu "
                    "more",
                    limit.what, limit.value, DeviceName(device), limit.most));
  }
  return absl::OkStatus();
}

// A model as its files describe it, before any weight is read.
struct Described {
  ModelConfig config;
  ShardLayout layout;
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<std::string> warnings;  // of experimental features

  static absl::StatusOr<Described> Read(const RankModelOptions& options) {
    ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(options.model_dir));
    ASSIGN_OR_RETURN(std::vector<std::string> warnings,
                     CheckCapabilities(options.device, config.attention_kind(), options.features));
    ASSIGN_OR_RETURN(ShardLayout layout, ShardLayout::Create(options.layout,
                                                             {.num_q_heads = config.num_q_heads,
                                                              .num_kv_heads = config.num_kv_heads},
                                                             options.rank));
    if (options.max_model_len.has_value() &&
        *options.max_model_len > config.max_position_embeddings) {
      return absl::InvalidArgumentError(
          fmt::format("--max-model-len is {}; this model has positions for at most {}",
                      *options.max_model_len, config.max_position_embeddings));
    }
    RETURN_IF_ERROR(CheckRanksCanShare(config, layout, options.expert_parallel));
    if (options.device != Device::kCpu) {
      RETURN_IF_ERROR(CheckDeviceKernels(options.device, config));
    }
    if (options.quantization.has_value() && options.device != Device::kCpu) {
      return absl::InvalidArgumentError(
          fmt::format("--quantization: {} has no kernels for integer weights; --device=cpu has",
                      DeviceName(options.device)));
    }
    if (options.quantization.has_value()) {
      RETURN_IF_ERROR(CheckQuantGroups(config, layout, options.expert_parallel));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(options.model_dir));
    RETURN_IF_ERROR(CheckTensors(config, *checkpoint));
    return Described{std::move(config), layout, std::move(checkpoint), std::move(warnings)};
  }
};

}  // namespace

absl::Status RankModel::Check(const RankModelOptions& options) {
  return Described::Read(options).status();
}

absl::StatusOr<RankModel> RankModel::Load(const RankModelOptions& options, kernels::Stream& stream,
                                          const std::function<void(int done, int of)>& on_layer) {
  ASSIGN_OR_RETURN(const Memory memory, MemoryOf(options, stream));  // before our weights are in it
  ASSIGN_OR_RETURN(Described described, Described::Read(options));
  auto& [config, layout, checkpoint, warnings] = described;
  const DType dtype = options.dtype.value_or(config.dtype);
  const WeightFormat format = options.quantization.value_or(FormatOf(dtype));
  // A GPU's tensor cores take K and V as they take the queries.
  const bool as_weights = dtype == DType::kFloat32 || options.device != Device::kCpu;
  const DType kv_dtype = options.kv_cache_dtype.value_or(as_weights ? dtype : DType::kFloat16);
  const KvCacheShape shape{.num_layers = config.num_layers,
                           .num_kv_heads = layout.GroupKvHeads().size(),
                           .head_dim = config.head_dim,
                           .value_dim = config.mla.has_value() ? 0 : config.value_dim,
                           .block_tokens_per_rank = layout.block_tokens_per_rank(),
                           .dtype = kv_dtype};
  const int num_layers = config.num_layers;
  ASSIGN_OR_RETURN(
      DecoderWeights weights,
      LoadDecoderWeights(config, *checkpoint, layout, dtype, format, options.expert_parallel,
                         stream, [&](int done) { on_layer(done, num_layers); }));
  ASSIGN_OR_RETURN(std::int32_t num_blocks,
                   BlocksThatFit(options, config, layout, shape, weights.SizeBytes(), memory));
  if (options.device != Device::kCpu) {
    warnings.push_back(
        fmt::format("{}: experimental: its kernels have been run under emulation only",
                    DeviceName(options.device)));
  }
  if (std::string note = LayoutNote(layout, config); !note.empty()) {
    warnings.push_back(std::move(note));
  }
  return RankModel{.config = std::move(config),
                   .layout = layout,
                   .weights = std::move(weights),
                   .dtype = dtype,
                   .weight_format = format,
                   .kv_shape = shape,
                   .num_blocks = num_blocks,
                   .fingerprint = checkpoint->fingerprint(),
                   .warnings = std::move(warnings)};
}

absl::StatusOr<std::int64_t> RankModel::ResolveMaxModelLen(std::optional<std::int64_t> asked,
                                                           std::int32_t group_blocks) const {
  const std::int64_t capacity = static_cast<std::int64_t>(group_blocks) * layout.block_size();
  if (!asked.has_value()) return std::min(config.max_position_embeddings, capacity);
  if (*asked > capacity) {
    return absl::InvalidArgumentError(fmt::format(
        "--max-model-len is {}, but the KV cache holds {} tokens ({} blocks of {}); give at most "
        "that, 'auto', or a larger --kv-cache-memory-bytes (one rank stores {} bytes per block)",
        *asked, capacity, group_blocks, layout.block_size(), kv_shape.BytesPerBlock()));
  }
  return *asked;
}

std::string RankModel::Agreement(const RankModelOptions& options) const {
  return fmt::format(
      "plan version {}, architecture {}, checkpoint {:016x}, tensor_parallel_size {}, "
      "decode_context_parallel_size {}, block_size {}, cp_kv_cache_interleave_size {}, dtype {}, "
      "weights {}, "
      "kv_cache_dtype {}, dcp_comm_backend {}, dcp_replicate_query {}, enable_expert_parallel {}, "
      "max_num_seqs {}, max_num_batched_tokens {}, inputs of products rounded {}",
      kPlanVersion, config.architecture, fingerprint, layout.tensor_parallel_size(),
      layout.decode_context_parallel_size(), layout.block_size(), layout.interleave(),
      DTypeName(dtype), FormatName(weight_format), DTypeName(kv_shape.dtype),
      DcpExchangeName(options.exchange), options.layout.replicate_query ? "yes" : "no",
      options.expert_parallel ? "yes" : "no", options.max_num_seqs, options.max_num_batched_tokens,
      options.device == Device::kCpu && kernels::RoundsInputs(weight_format) ? "yes" : "no");
}

std::string RankModel::Summary(std::int32_t group_blocks, std::int64_t max_model_len) const {
  const std::int32_t n = layout.decode_context_parallel_size();
  const std::int64_t capacity = static_cast<std::int64_t>(group_blocks) * layout.block_size();
  std::string text = fmt::format(
      "layout: tensor_parallel_size {} x decode_context_parallel_size {}, block_size {} "
      "({} tokens a rank), cp_kv_cache_interleave_size {}\n"
      "kv cache: {} bytes per token per rank, {:.2f} copies of each entry over the group, {}\n"
      "kv capacity: {} blocks = {} tokens, {:.1f} sequences of max_model_len {}\n",
      layout.tensor_parallel_size(), n, layout.block_size(), layout.block_tokens_per_rank(),
      layout.interleave(), kv_shape.BytesPerLocalToken() / n, layout.KvCopies(),
      DTypeName(kv_shape.dtype), group_blocks, capacity,
      static_cast<double>(capacity) / static_cast<double>(max_model_len), max_model_len);
  text += ExtraWeights(config, layout, dtype);
  for (const std::string& warning : warnings) text += fmt::format("note: {}\n", warning);
  return text;
}

}  // namespace weft
