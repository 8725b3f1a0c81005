#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "kernels/attention.h"
#include "server/base/status_macros.h"
#include "worker/model/config_fields.h"

// What tells the families apart: a row of kFamilies each, and what a row cannot say in a function.

namespace weft {
namespace {

using nlohmann::json;

// A key that would change the result and that only one value of is computed here. Null is as good
// as absent.
struct FixedKey {
  const char* key;
  const char* value;  // JSON; null means that the key must not be set
};

constexpr FixedKey kFixedKeys[] = {
    // Weights that are not what their dtype says.
    {"quantization_config", "null"},
    {"compression_config", "null"},
    // Positions.
    {"partial_rotary_factor", "1"},
    {"rotary_pct", "1"},
    {"rope_interleaved", "false"},
    {"rope_interleave", "false"},
    {"use_mrope", "false"},
    {"no_rope_layers", "null"},
    {"no_rope_layer_interval", "null"},
    {"alibi", "false"},
    {"use_alibi", "false"},
    // Attention.
    {"attention_chunk_size", "null"},
    {"attn_logit_softcapping", "null"},
    {"query_pre_attn_scalar", "null"},
    {"attention_multiplier", "null"},
    {"clip_qkv", "null"},
    {"qk_norm", "false"},
    {"use_qk_norm", "false"},
    {"qk_layernorm", "false"},
    {"is_causal", "true"},
    {"use_bidirectional_attention", "false"},
    {"is_encoder_decoder", "false"},
    {"add_cross_attention", "false"},
    // Layers and logits.
    {"pretraining_tp", "1"},
    {"parallel_attn", "false"},
    {"num_experts", "0"},
    {"num_local_experts", "0"},
    {"n_routed_experts", "null"},
    {"n_shared_experts", "null"},
    {"shared_expert_intermediate_size", "null"},
    {"moe_layer_freq", "1"},
    {"kv_lora_rank", "null"},
    {"q_lora_rank", "null"},
    {"index_topk", "null"},
    {"embedding_multiplier", "1"},
    {"residual_multiplier", "1"},
    {"logits_scaling", "1"},
    {"logit_scale", "1"},
    {"final_logit_softcapping", "null"},
    {"scale_emb", "1"},
    {"scale_depth", "null"},
    {"dim_model_base", "null"},
    {"pruned_heads", "{}"},
};

enum class AttentionBias : std::uint8_t {
  kNone,
  kByKey,  // attention_bias: of q, k, v and o
  kQkv,    // always of q, k and v; no key says so
};

enum class Window : std::uint8_t {
  kNone,
  kAllLayers,  // sliding_window
  kIfUsed,     // with use_sliding_window, from layer max_window_layers on
};

struct Family {
  std::string_view architecture;
  std::array<std::string_view, 2> model_types;  // any of these
  // The defaults of its keys; 0: the common one (as many KV heads as query heads, hidden_size /
  // heads).
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int64_t max_position_embeddings = 32768;
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  AttentionBias attention_bias = AttentionBias::kNone;
  bool reads_mlp_bias = false;
  bool qk_norm = false;
  Window window = Window::kNone;
  std::int64_t sliding_window = 0;  // when the key is absent
  // Reads what only this family has; `reads` are keys of kFixedKeys that it takes care of.
  void (*read_more)(JsonFields& fields, ModelConfig& config) = nullptr;
  std::array<std::string_view, 8> reads = {};
};

constexpr Family kFamilies[] = {
    {.architecture = "LlamaForCausalLM",
     .model_types = {"llama"},
     .max_position_embeddings = 2048,
     .attention_bias = AttentionBias::kByKey,
     .reads_mlp_bias = true},
    {.architecture = "MistralForCausalLM",
     .model_types = {"mistral"},
     .num_kv_heads = 8,
     .max_position_embeddings = 131072,
     .window = Window::kAllLayers,
     .sliding_window = 4096},
    {.architecture = "Qwen2ForCausalLM",
     .model_types = {"qwen2"},
     .num_kv_heads = 32,
     .attention_bias = AttentionBias::kQkv,
     .window = Window::kIfUsed,
     .sliding_window = 4096},
    {.architecture = "Qwen3ForCausalLM",
     .model_types = {"qwen3"},
     .num_kv_heads = 32,
     .head_dim = 128,
     .attention_bias = AttentionBias::kByKey,
     .qk_norm = true,
     .window = Window::kIfUsed,
     .sliding_window = 4096},
    {.architecture = "MixtralForCausalLM",
     .model_types = {"mixtral"},
     .num_kv_heads = 8,
     .max_position_embeddings = 131072,
     .rope_theta = 1e6,
     .rms_norm_eps = 1e-5,
     .window = Window::kAllLayers,
     .read_more = ReadMixtralExperts,
     .reads = {"num_local_experts"}},
    {.architecture = "Qwen3MoeForCausalLM",
     .model_types = {"qwen3_moe"},
     .num_kv_heads = 4,
     .attention_bias = AttentionBias::kByKey,
     .qk_norm = true,
     .read_more = ReadQwen3Experts,
     .reads = {"num_experts", "num_local_experts"}},
    {.architecture = "DeepseekV2ForCausalLM",
     .model_types = {"deepseek_v2"},
     .max_position_embeddings = 2048,
     .attention_bias = AttentionBias::kByKey,
     .reads_mlp_bias = true,
     .read_more = ReadDeepseekV2,
     .reads = {"kv_lora_rank", "q_lora_rank", "n_routed_experts", "n_shared_experts",
               "rope_interleave"}},
    {.architecture = "DeepseekV3ForCausalLM",
     .model_types = {"deepseek_v3", "kimi_k2"},
     .max_position_embeddings = 4096,
     .attention_bias = AttentionBias::kByKey,
     .read_more = ReadDeepseekV3,
     .reads = {"kv_lora_rank", "q_lora_rank", "n_routed_experts", "n_shared_experts",
               "rope_interleave"}},
};

bool HasModelType(const Family& family, std::string_view model_type) {
  return std::find(family.model_types.begin(), family.model_types.end(), model_type) !=
         family.model_types.end();
}

void CheckFixedKeys(JsonFields& fields, const Family& family) {
  std::vector<FixedKey> keys(std::begin(kFixedKeys), std::end(kFixedKeys));
  if (family.attention_bias == AttentionBias::kNone) keys.push_back({"attention_bias", "false"});
  if (!family.reads_mlp_bias) keys.push_back({"mlp_bias", "false"});
  for (const FixedKey& fixed : keys) {
    if (std::find(family.reads.begin(), family.reads.end(), fixed.key) != family.reads.end()) {
      continue;
    }
    if (!fields.Has(fixed.key) || fields.Raw(fixed.key) == json::parse(fixed.value)) continue;
    fields.Fail(fixed.key, std::string_view(fixed.value) == "null"
                               ? std::string("it is not supported, and must not be set")
                               : fmt::format("only {} is supported", fixed.value));
  }
}

// layer_types repeats what the other keys say; where it says something else, one of them is wrong.
void CheckLayerTypes(JsonFields& fields, const ModelConfig& config) {
  if (!fields.Has("layer_types")) return;
  const json& types = fields.Raw("layer_types");
  bool agrees = types.is_array() && types.size() == static_cast<std::size_t>(config.num_layers);
  for (std::int32_t i = 0; agrees && i < config.num_layers; ++i) {
    agrees = types[i] == (config.HasWindow(i) ? "sliding_attention" : "full_attention");
  }
  if (agrees) return;
  const std::string allowed =
      config.sliding_window == 0
          ? std::string("full_attention for each")
          : fmt::format("full_attention up to layer {}, sliding_attention for those after",
                        config.first_window_layer);
  fields.Fail("layer_types",
              fmt::format("num_hidden_layers is {}, and by the other keys it must be {}",
                          config.num_layers, allowed));
}

void ReadWindow(JsonFields& fields, const Family& family, ModelConfig& config) {
  const bool used = fields.Bool("use_sliding_window", family.window != Window::kIfUsed);
  if (!used) return;
  if (family.window == Window::kNone) {
    if (fields.Has("sliding_window")) {
      fields.Fail("sliding_window", "it is not supported with this architecture; it must be null");
    }
    return;
  }
  if (fields.IsNull("sliding_window")) return;
  if (!fields.Has("sliding_window") && family.sliding_window == 0) return;
  config.sliding_window = fields.Int("sliding_window", 1, kMaxPositions, family.sliding_window);
  if (family.window == Window::kIfUsed) {
    config.first_window_layer =
        static_cast<std::int32_t>(fields.Int("max_window_layers", 0, kMaxLayers, 28));
  }
  if (config.first_window_layer >= config.num_layers) config.sliding_window = 0;
}

void ReadHeadCounts(JsonFields& fields, const Family& family, ModelConfig& config) {
  config.num_q_heads = Dimension(fields, "num_attention_heads");
  config.num_kv_heads = fields.Has("num_key_value_heads") ? Dimension(fields, "num_key_value_heads")
                        : family.num_kv_heads > 0         ? family.num_kv_heads
                                                          : config.num_q_heads;
  if (config.num_q_heads % config.num_kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                fmt::format("it must divide num_attention_heads, {}", config.num_q_heads));
  }
}

void ReadHeadDim(JsonFields& fields, const Family& family, ModelConfig& config) {
  const auto supported = [](std::int32_t head_dim) {
    return head_dim % 8 == 0 && head_dim <= kernels::kMaxHeadDim;
  };
  if (fields.Has("head_dim") || family.head_dim > 0) {
    config.head_dim = fields.Has("head_dim") ? Dimension(fields, "head_dim") : family.head_dim;
    if (!supported(config.head_dim)) {
      fields.Fail("head_dim",
                  fmt::format("it must be a multiple of 8, at most {}", kernels::kMaxHeadDim));
    }
  } else {
    config.head_dim = config.hidden_size / config.num_q_heads;
    if (config.hidden_size % config.num_q_heads != 0 || !supported(config.head_dim)) {
      fields.Fail(
          "hidden_size",
          fmt::format("without head_dim it must be num_attention_heads, {}, times a multiple "
                      "of 8, at most {}",
                      config.num_q_heads, kernels::kMaxHeadDim));
    }
  }
  if (std::int64_t{config.num_q_heads} * config.head_dim > kMaxDimension) {
    fields.Fail("num_attention_heads", fmt::format("times head_dim, {}, it must be at most {}",
                                                   config.head_dim, kMaxDimension));
  }
  config.value_dim = config.head_dim;
  config.rotary_dim = config.head_dim;
}

// Of q . k; the reference stretches it where RoPE is, in MLA alone.
float AttentionScale(const ModelConfig& config) {
  if (!config.mla.has_value()) return 1.0F / std::sqrt(static_cast<float>(config.head_dim));
  double scale = 1.0 / std::sqrt(static_cast<double>(config.mla->qk_head_dim()));
  if (config.rope.type != RopeType::kDefault && config.rope.mscale_all_dim != 0) {
    scale *= std::pow(YarnMagnitude(config.rope.factor, config.rope.mscale_all_dim), 2);
  }
  return static_cast<float>(scale);
}

absl::StatusOr<ModelConfig> Read(JsonFields& fields, const Family& family) {
  CheckFixedKeys(fields, family);
  RETURN_IF_ERROR(fields.status());
  ModelConfig config;
  config.architecture = family.architecture;
  config.num_layers = static_cast<std::int32_t>(fields.Int("num_hidden_layers", 1, kMaxLayers));
  config.hidden_size = Dimension(fields, "hidden_size");
  config.intermediate_size = Dimension(fields, "intermediate_size");
  config.vocab_size = Dimension(fields, "vocab_size");
  RETURN_IF_ERROR(fields.status());
  ReadHeadCounts(fields, family, config);
  ReadWindow(fields, family, config);
  CheckLayerTypes(fields, config);
  if (family.read_more != nullptr) family.read_more(fields, config);
  // transformers saves another head_dim with MLA.
  if (!config.mla.has_value()) ReadHeadDim(fields, family, config);
  if (config.moe && std::count(config.moe->layers.begin(), config.moe->layers.end(), true) == 0) {
    config.moe.reset();
  }
  config.max_position_embeddings =
      fields.Int("max_position_embeddings", 1, kMaxPositions, family.max_position_embeddings);
  config.rms_norm_eps =
      static_cast<float>(fields.Real("rms_norm_eps", 1e-30, 1, family.rms_norm_eps));
  config.o_bias =
      family.attention_bias == AttentionBias::kByKey && fields.Bool("attention_bias", false);
  config.qkv_bias =
      (config.o_bias && !config.mla.has_value()) || family.attention_bias == AttentionBias::kQkv;
  config.mlp_bias = family.reads_mlp_bias && fields.Bool("mlp_bias", false);
  config.qk_norm = family.qk_norm;
  config.tie_word_embeddings = fields.Bool("tie_word_embeddings", false);
  const std::string activation = fields.String("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    fields.Fail("hidden_act", "only \"silu\" is supported");
  }
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(config.rope,
                   ReadRope(fields, config.max_position_embeddings, family.rope_theta));
  config.attention_scale = AttentionScale(config);
  return config;
}

std::string SupportedArchitectures() {
  std::string list;
  for (const Family& family : kFamilies) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", family.architecture);
  }
  return list;
}

// Architectures that are known, and refused as the capability table says.
constexpr std::pair<std::string_view, AttentionKind> kRefusedFamilies[] = {
    {"DeepseekV32ForCausalLM", AttentionKind::kSparseMla},
};

absl::StatusOr<const Family*> FindFamily(JsonFields& fields) {
  const std::string supported =
      fmt::format("supported architectures: {}", SupportedArchitectures());
  const std::string model_type = fields.String("model_type", "");
  const bool named = fields.Has("architectures");
  if (named && (!fields.Raw("architectures").is_array() || fields.Raw("architectures").empty() ||
                !fields.Raw("architectures").front().is_string())) {
    fields.Fail("architectures", "it must be a list with one name; " + supported);
  }
  if (!named && model_type.empty()) fields.Fail("architectures", supported);
  RETURN_IF_ERROR(fields.status());
  for (const auto& [architecture, kind] : kRefusedFamilies) {
    if (!named || fields.Raw("architectures").front() != architecture) continue;
    const Feature any[] = {Feature::kDecodeContextParallel};
    const absl::Status refused = CheckCapabilities(Device::kCpu, kind, any).status();
    fields.Fail("architectures", fmt::format("{}; {}", std::string(refused.message()), supported));
    return fields.status();
  }
  for (const Family& family : kFamilies) {
    if (named ? fields.Raw("architectures").front() != family.architecture
              : !HasModelType(family, model_type)) {
      continue;
    }
    if (!model_type.empty() && !HasModelType(family, model_type)) {
      fields.Fail("model_type", fmt::format("with {} it must be \"{}\"", family.architecture,
                                            family.model_types[0]));
      return fields.status();
    }
    return &family;
  }
  fields.Fail(named ? "architectures" : "model_type", supported);
  return fields.status();
}

}  // namespace

absl::StatusOr<ModelConfig> ReadFamily(JsonFields& fields) {
  ASSIGN_OR_RETURN(const Family* const family, FindFamily(fields));
  return Read(fields, *family);
}

}  // namespace weft
