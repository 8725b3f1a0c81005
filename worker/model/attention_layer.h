#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/mla_prefill.h"
#include "worker/model/paged_attention.h"

namespace weft {

// The attention of every layer of one rank. Allocates nothing once it is made. One thread.
class AttentionLayer {
 public:
  virtual ~AttentionLayer() = default;

  // Once a step, before its layers.
  virtual void BeginStep(const AttentionStep& step) = 0;

  // x += this rank's part of Attention(normed), both [num_rows, hidden]: the sum of all ranks' x is
  // the layer's output when `residual` is x on exactly one rank and null on the others.
  virtual absl::Status Run(std::int32_t layer, const DecoderLayerWeights& weights,
                           const AttentionStep& step, const float* normed, const float* residual,
                           float* x, kernels::Stream& stream) = 0;

  virtual std::int64_t workspace_bytes() const = 0;
};

struct AttentionOptions {
  std::int32_t max_rows = 0;
  DcpExchange exchange = DcpExchange::kAgRs;
  std::optional<MlaForm> mla_form;  // of a prompt's rows; absent: the cheapest
  bool round_to_bfloat16 = false;   // see kernels::GqaAttentionParams
};

// What the model of `config` attends with. References outlive it.
absl::StatusOr<std::unique_ptr<AttentionLayer>> MakeAttentionLayer(
    const ModelConfig& config, const ShardLayout& layout, const AttentionOptions& options,
    KvCache& cache, Communicator& dcp, kernels::Stream& stream);

// The largest collective that it asks `dcp` for, for FabricCommunicatorOptions::max_bytes.
std::int64_t MaxAttentionCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                         std::int32_t max_rows);

}  // namespace weft
