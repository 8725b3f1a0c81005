#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "kernels/moe.h"
#include "server/capabilities.h"

namespace weft {

enum class RopeType : std::uint8_t { kDefault, kLinear, kLlama3, kYarn };

// rope_parameters (transformers 5) or rope_theta + rope_scaling (transformers 4) of config.json.
struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0;        // yarn
  double beta_slow = 1.0;
  std::optional<double> attention_factor;
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
  bool truncate = true;
  std::int64_t original_max_position_embeddings = 0;  // llama3, yarn

  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

// Multi-head latent attention.
struct MlaConfig {
  std::int32_t q_lora_rank = 0;  // 0: queries are projected at once
  std::int32_t kv_lora_rank = 0;
  std::int32_t qk_nope_head_dim = 0;
  std::int32_t qk_rope_head_dim = 0;
  std::int32_t v_head_dim = 0;
  bool rope_interleave = true;  // the checkpoint's rotary pairs are (2i, 2i + 1), not halves

  std::int32_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

// A mixture of experts in place of the MLP of some layers.
struct MoeConfig {
  std::int32_t num_experts = 0;
  std::int32_t experts_per_token = 0;
  std::int32_t intermediate_size = 0;         // width of an expert
  std::int32_t shared_intermediate_size = 0;  // of an MLP that every token also goes to; 0: none
  std::vector<bool> layers;                   // [num_layers] which have it

  // How a token's experts are chosen and weighed; see kernels/moe.h.
  kernels::ExpertScore score = kernels::ExpertScore::kSoftmax;
  bool score_bias = false;
  kernels::GroupScore group_score = kernels::GroupScore::kNone;
  std::int32_t num_groups = 1;
  std::int32_t groups_per_token = 1;
  bool normalize = false;
  float scale = 1.0f;

  // What checkpoints call it in a layer.
  std::string_view block = "mlp";
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
};

// What a model's config.json says, checked: every value is in range and every key that would change
// the result is either understood or refused.
struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM"
  std::int32_t num_layers = 0;
  std::int32_t hidden_size = 0;
  std::int32_t intermediate_size = 0;
  std::int32_t num_q_heads = 0;
  // What attention caches and compares a token by: K of each KV head, num_kv_heads dividing
  // num_q_heads; with MLA one latent, [kv_lora_rank | qk_rope_head_dim].
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t value_dim = 0;   // of V: head_dim; with MLA kv_lora_rank, the latent's first dims
  std::int32_t rotary_dim = 0;  // even
  float attention_scale = 0;    // of q . k
  std::optional<MlaConfig> mla;
  std::int32_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  float rms_norm_eps = 1e-6f;
  RopeConfig rope;
  bool qkv_bias = false;  // not with MLA
  bool o_bias = false;    // with MLA also of what projects into the latents
  bool mlp_bias = false;  // of gate, up and down
  bool qk_norm = false;   // an RMSNorm over each head of q and of k, before RoPE
  // Row i of layers [first_window_layer, num_layers) sees positions (i - sliding_window, i]; 0: all
  // up to i.
  std::int64_t sliding_window = 0;
  std::int32_t first_window_layer = 0;
  std::optional<MoeConfig> moe;
  bool tie_word_embeddings = false;
  DType dtype = DType::kFloat32;  // of the checkpoint: `dtype` or `torch_dtype`
  std::optional<std::int32_t> bos_token_id;
  // Those of generation_config.json when it has any, else those of config.json.
  std::vector<std::int32_t> eos_token_ids;

  bool HasWindow(std::int32_t layer) const {
    return sliding_window > 0 && layer >= first_window_layer;
  }
  AttentionKind attention_kind() const {
    return mla.has_value()      ? AttentionKind::kMla
           : sliding_window > 0 ? AttentionKind::kSlidingWindow
                                : AttentionKind::kGqa;
  }
  bool HasExperts(std::int32_t layer) const { return moe.has_value() && moe->layers[layer]; }
};

// Reads MODEL_DIR/config.json and generation_config.json. NOT_FOUND when there is no config.json;
// INVALID_ARGUMENT names file, key and value, and what is allowed.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::filesystem::path& model_dir);

// Reads that config.json alone, for planning: what quantization_config says of the weights is left
// aside, and so are the tokens that end a sequence.
absl::StatusOr<ModelConfig> DescribeModel(const std::filesystem::path& config_json);

// inv_freq[i] for pair i of head_dim / 2, and what cos and sin are multiplied by.
// Formulas and order of roundings: transformers' modeling_rope_utils, in float32.
struct RopeFrequencies {
  std::vector<float> inv_freq;
  float attention_scaling = 1.0f;
};
// How much larger yarn makes what it multiplies; 1 for a factor that stretches nothing.
double YarnMagnitude(double factor, double mscale);
RopeFrequencies ComputeRopeFrequencies(const RopeConfig& config, std::int32_t rotary_dim);

}  // namespace weft
