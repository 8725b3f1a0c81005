#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/device_stream.h"
#include "kernels/device/stream.h"
#include "kernels/linear.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/model_config.h"

namespace weft {

// The mixture of experts of every layer that has one, on one rank: all ranks route all rows alike,
// each runs what it holds of the experts (whole ones, or a slice of each one's width), and the sum
// over ranks is the layer's. Every row gets all its experts. Allocates nothing after Create(). One
// thread.
class MoeLayer {
 public:
  // `config` has a mixture of experts, and outlives this.
  static absl::StatusOr<MoeLayer> Create(const ModelConfig& config, const DecoderWeights& weights,
                                         std::int32_t max_rows, kernels::Stream& stream);

  // x = residual + this rank's part of Experts(normed), both
  // [num_rows, hidden]; `residual` may be x, or null.
  absl::Status Run(const MoeWeights& weights, const float* normed, const float* residual, float* x,
                   std::int32_t num_rows, kernels::Stream& stream);

  std::int64_t workspace_bytes() const;

 private:
  MoeLayer() = default;

  absl::Status Route(const MoeWeights& weights, const float* normed, std::int32_t num_rows,
                     kernels::Stream& stream);
  // Of all rows that are routed, on a device without knowing how many those are.
  absl::Status RunExpertsOnHost(const MoeWeights& weights, const float* normed,
                                kernels::Stream& stream);
  absl::Status RunExpertsOnDevice(const MoeWeights& weights, const float* normed,
                                  std::int32_t num_rows, kernels::DeviceStream& device);
  absl::Status RunExperts(const kernels::MatrixGroup& weights, const float* x, float* y,
                          kernels::Stream& stream);

  const ModelConfig* config_ = nullptr;
  kernels::Buffer experts_;       // [rows, top_k]
  kernels::Buffer place_of_;      // [rows, top_k]
  kernels::Buffer row_of_;        // [routed rows]
  kernels::Buffer expert_begin_;  // [own experts + 1]
  std::vector<kernels::LinearParams> products_;
  kernels::Buffer logits_;     // [rows, experts]
  kernels::Buffer scratch_;    // [rows, 2 * experts]
  kernels::Buffer weights_;    // [rows, top_k]
  kernels::Buffer routed_x_;   // [routed rows, hidden]; on the CPU
  kernels::Buffer gate_up_;    // [routed rows, 2 * own width]; on a device
  kernels::Buffer activated_;  // [routed rows, own width]
  kernels::Buffer routed_y_;   // [routed rows, hidden]
};

}  // namespace weft
