// weft-plan, which `weft plan` runs: what layouts of a model hold and cost, without its weights.

#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "server/base/output.h"
#include "server/base/status_macros.h"
#include "server/exit_codes.h"
#include "server/group_flags.h"
#include "server/options.h"
#include "worker/model/model_config.h"
#include "worker/plan/layout_plan.h"
#include "worker/plan/plan_text.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

struct Flags {
  std::string model;
  PlanOptions plan;
  std::string dtype = "auto";
  std::string kv_cache_dtype = "auto";
  std::string exchange = "ag_rs";
  std::string gpu = "none";
  std::optional<std::int64_t> device_memory;
  std::optional<std::int64_t> kv_cache_memory_bytes;
  double utilization = 0.9;
  std::vector<std::string> contexts;
  std::string format = "text";

  void AddTo(OptionParser& parser) {
    parser.Group("Model");
    parser.Add("--model,MODEL", &model, "A config.json, or the directory it is in");
    parser.AddChoice("--dtype", &dtype, {"auto", "float32", "bfloat16", "float16", "fp8", "nvfp4"},
                     "Of the weights; auto: as config.json says. fp8 and nvfp4 are planned, not "
                     "served");
    parser.AddChoice("--kv-cache-dtype", &kv_cache_dtype,
                     {"auto", "float32", "bfloat16", "float16", "fp8"},
                     "Of the KV cache; auto: float32 with fp32 weights, else 16 bits. fp8 is "
                     "planned, not served");
    parser.Group("Layout");
    parser.Add("--tensor-parallel-size,-tp", &plan.tensor_parallel_size,
               "Ranks of the group; default: powers of two up to 16", Range(1, 1024));
    parser.Add("--decode-context-parallel-size,-dcp", &plan.decode_context_parallel_size,
               "Ranks that share the KV cache of a sequence by position; default: all that divide "
               "the above",
               Range(1, 1024));
    parser.Add("--block-size", &plan.block_size,
               "Tokens of a KV block over the ranks that share it", Range(1, kMaxInt32));
    parser.Add("--cp-kv-cache-interleave-size", &plan.interleave, "Consecutive tokens on one rank",
               Range(1, kMaxInt32));
    parser.AddChoice("--dcp-comm-backend", &exchange, {"ag_rs", "a2a"},
                     "How ranks exchange partial attention");
    parser.Add("--dcp-replicate-query", &plan.replicate_query,
               "Every rank projects the queries of its whole DCP group");
    parser.Add("--enable-expert-parallel", &plan.expert_parallel,
               "Share out whole experts over the ranks, not each expert's width");
    parser.Group("Memory and load");
    parser.AddBytes("--device-memory", &device_memory,
                    "Of a rank, for weights and KV; default: that of --gpu");
    parser.Add("--gpu-memory-utilization", &utilization, "How much of it may be used",
               Range(0.01, 1));
    parser.AddBytes("--kv-cache-memory-bytes", &kv_cache_memory_bytes, "KV cache per rank");
    parser.Add("--context", &contexts,
               "Tokens of a sequence, comma-separated, with k, K, m or M behind them; default: the "
               "model's positions");
    parser.Add("--max-num-seqs", &plan.max_num_seqs, "Sequences in one step, at most",
               Range(1, kMaxInt32));
    parser.AddChoice("--gpu", &gpu, {"none", "a100", "h100", "h200", "b200"},
                     "Estimate times on these, with 16 bits on the wire; without, bytes are those "
                     "of fp32 on the CPU");
    parser.AddChoice("--format", &format, {"text", "json"}, "json: a list of objects");
  }
};

absl::Status SetMemory(Flags& flags) {
  flags.plan.gpu = FindGpu(flags.gpu);
  if (flags.plan.gpu.has_value()) flags.plan.wire_bytes = 2;
  if (flags.kv_cache_memory_bytes.has_value()) {
    if (flags.device_memory.has_value()) {
      return absl::InvalidArgumentError(
          "--device-memory and --kv-cache-memory-bytes are both given; one of them is wanted");
    }
    flags.plan.kv_memory_bytes = *flags.kv_cache_memory_bytes;
    return absl::OkStatus();
  }
  if (!flags.device_memory.has_value() && !flags.plan.gpu.has_value()) {
    return absl::InvalidArgumentError(fmt::format(
        "how much memory is not known: give --device-memory, --kv-cache-memory-bytes, or --gpu, "
        "one of {}",
        GpuNames()));
  }
  const double memory = flags.device_memory.has_value() ? static_cast<double>(*flags.device_memory)
                                                        : flags.plan.gpu->memory_bytes;
  flags.plan.memory_bytes = static_cast<std::int64_t>(memory * flags.utilization);
  return absl::OkStatus();
}

absl::Status SetContexts(const ModelConfig& config, Flags& flags) {
  for (const std::string& text : flags.contexts) {
    const std::optional<std::int64_t> tokens = ParseTokens(text);
    if (!tokens.has_value()) {
      return absl::InvalidArgumentError(fmt::format(
          "--context is \"{}\"; numbers from 1 to {}, with k, K, m or M behind them, are allowed",
          text, kMaxInt32));
    }
    flags.plan.contexts.push_back(*tokens);
  }
  if (flags.contexts.empty()) flags.plan.contexts = {config.max_position_embeddings};
  return absl::OkStatus();
}

absl::Status Plan(Flags& flags) {
  if (flags.model.empty()) {
    return absl::InvalidArgumentError("no model: give --model, a config.json or its directory");
  }
  std::filesystem::path path = flags.model;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) path /= "config.json";
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(fmt::format("{}: there is no such file (--model)", path.string()));
  }
  RETURN_IF_ERROR(SetMemory(flags));
  ASSIGN_OR_RETURN(const ModelConfig config, DescribeModel(path));
  RETURN_IF_ERROR(SetContexts(config, flags));
  const std::string_view dtype = flags.dtype == "auto" ? DTypeName(config.dtype) : flags.dtype;
  flags.plan.weight_bytes = *StorageBytes(dtype);
  flags.plan.kv_bytes = flags.kv_cache_dtype == "auto" ? (dtype == "float32" ? 4 : 2)
                                                       : *StorageBytes(flags.kv_cache_dtype);
  flags.plan.a2a_exchange = flags.exchange == "a2a";
  ASSIGN_OR_RETURN(std::vector<LayoutPlan> plans, PlanLayouts(config, flags.plan));
  const std::string recommendation = Recommend(absl::MakeSpan(plans));
  PrintOut(flags.format == "json" ? PlanJson(plans) : PlanText(plans, recommendation));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  OptionParser parser("weft plan",
                      "What each layout of a model holds and costs, from its config.json alone.");
  flags.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  if (const absl::Status status = Plan(flags); !status.ok()) {
    PrintErr("weft plan: {}\n", std::string(status.message()));
    return kExitConfigError;
  }
  return FinishOutput(0);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::Main(argc, argv); }
