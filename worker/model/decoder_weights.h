#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "kernels/linear.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"
#include "worker/model/shard_layout.h"

namespace weft {

// One rank's part of a decoder's weights, packed for the kernels. Biases are empty when the model
// has none. `o` and `down` sum over ranks, so their bias is on rank 0 alone.
struct DecoderLayerWeights {
  std::vector<float> input_norm;  // [hidden]
  kernels::PackedMatrix q;        // [projected q heads * head_dim, hidden]
  kernels::PackedMatrix kv;       // [2 * group kv heads * head_dim, hidden]: K rows, then V rows
  kernels::PackedMatrix o;        // [hidden, own q heads * head_dim]
  std::vector<float> q_bias;
  std::vector<float> kv_bias;
  std::vector<float> o_bias;
  std::vector<float> q_norm;  // [head_dim], empty when the model has none
  std::vector<float> k_norm;

  std::vector<float> post_attention_norm;  // [hidden]
  kernels::PackedMatrix gate_up;  // [2 * own intermediate, hidden]: gate rows, then up rows
  kernels::PackedMatrix down;     // [hidden, own intermediate]
  std::vector<float> gate_up_bias;
  std::vector<float> down_bias;
};

struct DecoderWeights {
  kernels::PackedMatrix embedding;  // [own vocabulary, hidden]
  kernels::PackedMatrix lm_head;    // [own vocabulary, hidden]; empty when tied to the embedding
  std::vector<float> final_norm;    // [hidden]
  std::vector<DecoderLayerWeights> layers;

  const kernels::PackedMatrix& head() const {
    return lm_head.out_features() > 0 ? lm_head : embedding;
  }
  std::int64_t SizeBytes() const;
};

// What kernels take for a bias: null for one that the model does not have.
inline const float* OrNull(const std::vector<float>& bias) {
  return bias.empty() ? nullptr : bias.data();
}

// Packs this rank's part of `checkpoint` as `dtype` (norms and biases stay fp32). `on_layer(done)`
// is called after each layer, for progress. Errors name file, tensor and value; also
// INVALID_ARGUMENT when T is larger than a dimension it divides.
absl::StatusOr<DecoderWeights> LoadDecoderWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const ShardLayout& layout, DType dtype,
                                                  kernels::Stream& stream,
                                                  const std::function<void(int done)>& on_layer);

}  // namespace weft
