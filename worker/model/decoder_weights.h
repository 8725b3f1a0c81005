#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "kernels/device/vector.h"
#include "kernels/linear.h"
#include "worker/model/model_config.h"
#include "worker/model/model_layout.h"
#include "worker/model/safetensors.h"
#include "worker/model/shard_layout.h"

namespace weft {

// One rank's part of a decoder's weights, packed for the kernels. Biases are empty when the model
// has none. `o` and `down` sum over ranks, so their bias is on rank 0 alone.
// What MLA has in place of q and kv. Rotary rows are in halves, however the checkpoint has them.
struct MlaWeights {
  kernels::PackedMatrix q_a;  // [q_lora_rank, hidden]; empty without
  kernels::Vector q_a_bias;
  kernels::Vector q_a_norm;
  kernels::PackedMatrix q_b;   // [projected heads * (nope + rope), q_lora_rank or hidden]
  kernels::PackedMatrix kv_a;  // [kv_lora_rank + rope, hidden]
  kernels::Vector kv_a_bias;
  kernels::Vector kv_a_norm;
  // W_UK of each projected head, transposed: [kv_lora_rank, nope].
  kernels::MatrixGroup k_up;
  // W_UK of each own head as it is, [nope, kv_lora_rank], to decompress keys with; empty where the
  // kernels have no room for decompressed heads, and on devices, where all rows are absorbed.
  kernels::MatrixGroup k_from_latent;
  // W_UV of each own head, or of the DCP group's if values are projected before they are merged:
  // [v_head_dim, kv_lora_rank].
  kernels::MatrixGroup v_up;
};

struct MoeWeights {
  kernels::PackedMatrix router;  // [experts, hidden]
  kernels::Vector score_bias;
  // The experts of this rank: all of them, each [2 * own width, hidden] and [hidden, own width], or
  // with expert parallelism whole ones from first_expert on. Empty in a layer that has none.
  std::int32_t first_expert = 0;
  kernels::MatrixGroup gate_up;
  kernels::MatrixGroup down;
};

struct DecoderLayerWeights {
  kernels::Vector input_norm;  // [hidden]
  MlaWeights mla;              // in place of q and kv
  kernels::PackedMatrix q;     // [projected q heads * head_dim, hidden]
  kernels::PackedMatrix kv;    // [2 * group kv heads * head_dim, hidden]: K rows, then V rows
  kernels::PackedMatrix o;     // [hidden, own q heads * head_dim (with MLA: v_head_dim)]
  kernels::Vector q_bias;
  kernels::Vector kv_bias;
  kernels::Vector o_bias;
  kernels::Vector q_norm;  // [head_dim], empty when the model has none
  kernels::Vector k_norm;

  kernels::Vector post_attention_norm;  // [hidden]
  MoeWeights moe;
  // The MLP; beside experts, the one that every token also goes to. Empty when there is none.
  // [2 * own intermediate, hidden]: on the CPU gated, on a device gate rows, then up rows.
  kernels::PackedMatrix gate_up;
  kernels::PackedMatrix down;  // [hidden, own intermediate]
  kernels::Vector gate_up_bias;
  kernels::Vector down_bias;
};

struct DecoderWeights {
  kernels::PackedMatrix embedding;  // [own vocabulary, hidden]
  kernels::PackedMatrix lm_head;    // [own vocabulary, hidden]; empty when tied to the embedding
  kernels::Vector final_norm;       // [hidden]
  std::vector<DecoderLayerWeights> layers;

  const kernels::PackedMatrix& head() const {
    return lm_head.out_features() > 0 ? lm_head : embedding;
  }
  std::int64_t SizeBytes() const;
  std::int32_t MaxInFeatures() const;  // of any product
};

// Packs this rank's part of `checkpoint` as `format`, which is `dtype` or integers. Of integers
// only large weights are: routers and what expands latents stay `dtype`, and embedding and head are
// int8 with int4. Norms and biases are fp32. `on_layer(done)` is called after each layer, for
// progress. CheckRanksCanShare() has said yes, and for integers CheckQuantGroups(). Errors name
// file, tensor and value.
absl::StatusOr<DecoderWeights> LoadDecoderWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const ShardLayout& layout, DType dtype,
                                                  WeightFormat format, bool expert_parallel,
                                                  kernels::Stream& stream,
                                                  const std::function<void(int done)>& on_layer);

}  // namespace weft
