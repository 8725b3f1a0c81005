#include "worker/plan/roofline.h"

#include <algorithm>
#include <cmath>

#include "fmt/format.h"

namespace weft {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;

// Public data sheets, SXM.
constexpr Gpu kGpus[] = {
    {"a100", 80 * kGib, 2.0e12, 312e12, 300e9},
    {"h100", 80 * kGib, 3.35e12, 989e12, 450e9},
    {"h200", 131 * kGib, 4.8e12, 989e12, 450e9},
    {"b200", 168 * kGib, 7.7e12, 2250e12, 900e9},
};

// The part of the routed experts that a batch reads when tokens choose at random.
double ExpertsTouched(const MoeConfig& moe, double batch) {
  const double chosen = double{1} * moe.experts_per_token / moe.num_experts;
  return 1 - std::pow(1 - chosen, batch);
}

}  // namespace

std::optional<Gpu> FindGpu(std::string_view name) {
  for (const Gpu& gpu : kGpus) {
    if (gpu.name == name) return gpu;
  }
  return std::nullopt;
}

std::string GpuNames() {
  std::string names;
  for (const Gpu& gpu : kGpus) names += fmt::format("{}{}", names.empty() ? "" : ", ", gpu.name);
  return names;
}

double DcpWireBytes(const ModelConfig& config, const ShardLayout& layout, const StepLoad& load) {
  const double n = layout.decode_context_parallel_size();
  if (n == 1) return 0;
  // F * R * Hg
  const double others = (n - 1) * static_cast<double>(load.batch) * layout.PaddedQHeads();
  double bytes = layout.GathersQueries() ? others * config.head_dim * load.wire_bytes : 0;
  bytes += others * MergedDim(config, layout) * load.wire_bytes;
  bytes += others * 4 * (load.a2a_exchange ? 1 : n);
  return bytes;
}

double TpWireBytes(const ModelConfig& config, const ShardLayout& layout, const StepLoad& load) {
  const double t = layout.tensor_parallel_size();
  return 2 * 2 * (t - 1) / t * static_cast<double>(load.batch) * config.hidden_size *
         load.wire_bytes;
}

StepEstimate EstimateStep(const ModelConfig& config, const ShardLayout& layout,
                          const StepLoad& load, const Gpu& gpu) {
  const auto batch = static_cast<double>(load.batch);
  const WeightCount weights = CountWeights(config, layout, load.expert_parallel);
  double read = static_cast<double>(weights.always);
  double used = static_cast<double>(weights.always);  // by one token
  if (config.moe.has_value()) {
    const MoeConfig& moe = *config.moe;
    const auto experts = static_cast<double>(weights.experts);
    read += experts * ExpertsTouched(moe, batch);
    used += experts * moe.experts_per_token / moe.num_experts;
  }
  StepEstimate step;
  step.weights = std::max(read * load.weight_bytes / gpu.bandwidth, 2 * used * batch / gpu.flops);

  const double n = layout.decode_context_parallel_size();
  const double tokens = batch * static_cast<double>(load.context) / n;  // of this rank
  const auto elements = static_cast<double>(KvElementsPerToken(config, layout));
  const double operations =
      2.0 * config.num_layers * layout.GroupQHeads().size() * (config.head_dim + config.value_dim);
  step.attention =
      std::max(tokens * elements * load.kv_bytes / gpu.bandwidth, tokens * operations / gpu.flops);

  int collectives = layout.tensor_parallel_size() > 1 ? 2 : 0;
  if (n > 1) collectives += (layout.GathersQueries() ? 1 : 0) + (load.a2a_exchange ? 1 : 2);
  const double bytes = DcpWireBytes(config, layout, load) + TpWireBytes(config, layout, load);
  step.wire = config.num_layers * (bytes / gpu.link + collectives * gpu.collective_seconds);
  step.overhead = config.num_layers * gpu.layer_seconds;
  return step;
}

}  // namespace weft
