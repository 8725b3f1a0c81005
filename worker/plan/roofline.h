#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "worker/model/model_config.h"
#include "worker/model/model_layout.h"
#include "worker/model/shard_layout.h"

namespace weft {

// What a vendor's data sheet says of a device; what a small collective takes, and, of a layer, its
// many small kernels: with these a short context loses the 20 to 35 % that others have measured.
struct Gpu {
  std::string_view name;
  double memory_bytes;
  double bandwidth;  // bytes per second
  double flops;      // per second, 16 bits, dense
  double link;       // bytes per second in one direction
  double collective_seconds = 8e-6;
  double layer_seconds = 60e-6;
};

std::optional<Gpu> FindGpu(std::string_view name);
std::string GpuNames();  // "a100, h100, ..."

// One decode step of `batch` sequences of `context` tokens, a row each.
struct StepLoad {
  std::int64_t batch = 1;
  std::int64_t context = 1;
  double weight_bytes = 2;  // of an element
  double kv_bytes = 2;
  double wire_bytes = 2;
  bool a2a_exchange = false;
  bool expert_parallel = false;
};

// Bytes that a rank receives in one layer from its DCP group, and in all-reduces of the whole
// group. F = (N - 1) / N and Hg = N * ceil(Hq / T) heads: queries F * R * Hg * D * e; outputs a2a
// F * R * Hg * (Do * e + 4), ag_rs F * R * Hg * Do * e + (N - 1) * R * Hg * 4; each of the two
// all-reduces 2 * (T - 1) / T * R * hidden * e.
double DcpWireBytes(const ModelConfig& config, const ShardLayout& layout, const StepLoad& load);
double TpWireBytes(const ModelConfig& config, const ShardLayout& layout, const StepLoad& load);

// Seconds, from the slower of bytes and operations at the device's limits: a bound from below, good
// to compare layouts with.
struct StepEstimate {
  double weights = 0;    // all products with weights
  double attention = 0;  // over the KV cache
  double wire = 0;       // collectives
  double overhead = 0;   // small kernels
  double total() const { return weights + attention + wire + overhead; }
};
StepEstimate EstimateStep(const ModelConfig& config, const ShardLayout& layout,
                          const StepLoad& load, const Gpu& gpu);

}  // namespace weft
