#include "worker/model/model_config.h"

#include <array>
#include <limits>
#include <utility>

#include "fmt/format.h"
#include "kernels/attention.h"
#include "server/base/status_macros.h"
#include "worker/model/json_reader.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxFileBytes = 16 << 20;
// Above any model there is; the product of two fits in 64 bits.
constexpr std::int64_t kMaxDimension = 1 << 24;
constexpr std::int64_t kMaxLayers = 1 << 16;
constexpr std::int64_t kMaxPositions = std::numeric_limits<std::int32_t>::max();
constexpr double kMaxFactor = 1e6;

std::int32_t Dimension(JsonFields& fields, const std::string& key) {
  return static_cast<std::int32_t>(fields.Int(key, 1, kMaxDimension));
}

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

void CheckFixedKeys(JsonFields& fields) {
  for (const FixedKey& fixed : kFixedKeys) {
    if (!fields.Has(fixed.key) || fields.Raw(fixed.key) == json::parse(fixed.value)) continue;
    fields.Fail(fixed.key, std::string_view(fixed.value) == "null"
                               ? std::string("it is not supported, and must not be set")
                               : fmt::format("only {} is supported", fixed.value));
  }
}

// A sliding window is off when use_sliding_window says so.
void CheckFullAttention(JsonFields& fields) {
  if (fields.Has("sliding_window") && fields.Bool("use_sliding_window", true)) {
    fields.Fail("sliding_window", "it is not supported with this architecture; it must be null");
  }
  if (!fields.Has("layer_types")) return;
  bool full = fields.Raw("layer_types").is_array();
  for (const json& type : fields.Raw("layer_types")) full = full && type == "full_attention";
  if (!full) fields.Fail("layer_types", "each layer must be \"full_attention\"");
}

constexpr std::string_view kRopeKeys[] = {"type",
                                          "rope_type",
                                          "rope_theta",
                                          "factor",
                                          "low_freq_factor",
                                          "high_freq_factor",
                                          "beta_fast",
                                          "beta_slow",
                                          "attention_factor",
                                          "mscale",
                                          "mscale_all_dim",
                                          "truncate",
                                          "finetuned",
                                          "original_max_position_embeddings",
                                          "partial_rotary_factor"};

// What is in an object about rotary embeddings changes the result, so an unknown key is an error.
void CheckRopeKeys(const json& object, JsonFields& fields) {
  for (const auto& item : object.items()) {
    if (item.value().is_null()) continue;
    bool known = false;
    for (std::string_view key : kRopeKeys) known = known || key == item.key();
    if (!known) fields.Fail(item.key(), "such a key is not supported here");
  }
  if (fields.Has("partial_rotary_factor") && fields.Raw("partial_rotary_factor") != 1) {
    fields.Fail("partial_rotary_factor", "only 1 is supported");
  }
}

RopeType ReadRopeType(JsonFields& fields) {
  const std::string key = fields.Has("rope_type") || !fields.Has("type") ? "rope_type" : "type";
  const std::string type = fields.String(key, "default");
  if (type == "default") return RopeType::kDefault;
  if (type == "linear") return RopeType::kLinear;
  if (type == "llama3") return RopeType::kLlama3;
  if (type == "yarn") return RopeType::kYarn;
  fields.Fail(key, fmt::format("{}it must be one of default, linear, llama3, yarn",
                               key == "type" ? "as rope_type " : ""));
  return RopeType::kDefault;
}

// Only the keys that the type reads are looked at, as in the reference.
void ReadRopeScaling(JsonFields& fields, std::int64_t max_position_embeddings, RopeConfig& rope) {
  rope.type = ReadRopeType(fields);
  if (rope.type == RopeType::kDefault) return;
  rope.factor = fields.Real("factor", 1e-6, kMaxFactor);
  if (rope.type == RopeType::kLinear) return;
  rope.original_max_position_embeddings =
      fields.Int("original_max_position_embeddings", 1, kMaxPositions,
                 rope.original_max_position_embeddings > 0 ? rope.original_max_position_embeddings
                                                           : max_position_embeddings);
  if (rope.type == RopeType::kLlama3) {
    rope.low_freq_factor = fields.Real("low_freq_factor", 1e-6, kMaxFactor);
    rope.high_freq_factor = fields.Real("high_freq_factor", 1e-6, kMaxFactor);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      fields.Fail("high_freq_factor",
                  fmt::format("it must be above low_freq_factor, {}", rope.low_freq_factor));
    }
    return;
  }
  rope.beta_fast = fields.Real("beta_fast", 1e-6, kMaxFactor, rope.beta_fast);
  rope.beta_slow = fields.Real("beta_slow", 1e-6, kMaxFactor, rope.beta_slow);
  rope.mscale = fields.Real("mscale", 0, kMaxFactor, 0);
  rope.mscale_all_dim = fields.Real("mscale_all_dim", 0, kMaxFactor, 0);
  rope.truncate = fields.Bool("truncate", true);
  if (fields.Has("attention_factor")) {
    rope.attention_factor = fields.Real("attention_factor", 1e-6, kMaxFactor);
  }
}

// Both layouts: `rope_parameters` with everything in it, or `rope_theta` beside `rope_scaling`.
absl::StatusOr<RopeConfig> ReadRope(JsonFields& fields, std::int64_t max_position_embeddings,
                                    double default_theta) {
  const std::string inner_length = "original_max_position_embeddings";
  RopeConfig outer;
  outer.theta = fields.Real("rope_theta", 1 + 1e-6, 1e12, default_theta);
  outer.original_max_position_embeddings = fields.Int(inner_length, 1, kMaxPositions, 0);
  RETURN_IF_ERROR(fields.status());
  std::optional<RopeConfig> rope;
  for (const std::string key : {"rope_parameters", "rope_scaling"}) {
    if (!fields.Has(key)) continue;
    const json& object = fields.Raw(key);
    if (!object.is_object()) {
      fields.Fail(key, "it must be an object or null");
      return fields.status();
    }
    RopeConfig read = outer;
    JsonFields inner(object, fmt::format("{}: {}", fields.where(), key));
    CheckRopeKeys(object, inner);
    read.theta = inner.Real("rope_theta", 1 + 1e-6, 1e12, outer.theta);
    ReadRopeScaling(inner, max_position_embeddings, read);
    if (outer.original_max_position_embeddings != 0 && inner.Has(inner_length) &&
        read.original_max_position_embeddings != outer.original_max_position_embeddings) {
      inner.Fail(inner_length, fmt::format("beside it, {} is {}", inner_length,
                                           outer.original_max_position_embeddings));
    }
    RETURN_IF_ERROR(inner.status());
    if (rope.has_value() && *rope != read) {
      fields.Fail(key, "rope_parameters says something else");
      return fields.status();
    }
    rope = read;
  }
  return rope.value_or(outer);
}

DType ReadDType(JsonFields& fields) {
  const std::string key = fields.Has("dtype") ? "dtype" : "torch_dtype";
  std::string name = fields.String(key, "float32");
  if (name.starts_with("torch.")) name.erase(0, 6);
  const std::optional<DType> dtype = ParseDType(name);
  if (!dtype) fields.Fail(key, "it must be float32, bfloat16 or float16");
  return dtype.value_or(DType::kFloat32);
}

std::vector<std::int32_t> ReadTokenIds(JsonFields& fields, const std::string& key,
                                       std::int32_t vocab_size) {
  if (!fields.Has(key)) return {};
  const json value = fields.Raw(key).is_array() ? fields.Raw(key) : json{fields.Raw(key)};
  std::vector<std::int32_t> ids;
  for (const json& id : value) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) {
      fields.Fail(key, fmt::format("each token id must be an integer in [0, {}), below vocab_size",
                                   vocab_size));
      return {};
    }
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

void ReadHeads(JsonFields& fields, ModelConfig& config) {
  config.num_q_heads = Dimension(fields, "num_attention_heads");
  config.num_kv_heads = fields.Has("num_key_value_heads") ? Dimension(fields, "num_key_value_heads")
                                                          : config.num_q_heads;
  if (config.num_q_heads % config.num_kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                fmt::format("it must divide num_attention_heads, {}", config.num_q_heads));
  }
  const auto supported = [](std::int32_t head_dim) {
    return head_dim % 8 == 0 && head_dim <= kernels::kMaxHeadDim;
  };
  if (fields.Has("head_dim")) {
    config.head_dim = Dimension(fields, "head_dim");
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
}

absl::StatusOr<ModelConfig> ReadLlama(JsonFields& fields) {
  CheckFixedKeys(fields);
  CheckFullAttention(fields);
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.num_layers = static_cast<std::int32_t>(fields.Int("num_hidden_layers", 1, kMaxLayers));
  config.hidden_size = Dimension(fields, "hidden_size");
  config.intermediate_size = Dimension(fields, "intermediate_size");
  config.vocab_size = Dimension(fields, "vocab_size");
  RETURN_IF_ERROR(fields.status());
  ReadHeads(fields, config);
  config.max_position_embeddings = fields.Int("max_position_embeddings", 1, kMaxPositions, 2048);
  config.rms_norm_eps = static_cast<float>(fields.Real("rms_norm_eps", 1e-30, 1, 1e-6));
  config.attention_bias = fields.Bool("attention_bias", false);
  config.mlp_bias = fields.Bool("mlp_bias", false);
  config.tie_word_embeddings = fields.Bool("tie_word_embeddings", false);
  const std::string activation = fields.String("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    fields.Fail("hidden_act", "only \"silu\" is supported");
  }
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(config.rope, ReadRope(fields, config.max_position_embeddings, 10000.0));
  return config;
}

struct Family {
  std::string_view architecture;
  std::string_view model_type;
  absl::StatusOr<ModelConfig> (*read)(JsonFields& fields);
};

constexpr std::array kFamilies = {
    Family{"LlamaForCausalLM", "llama", ReadLlama},
};

std::string SupportedArchitectures() {
  std::string list;
  for (const Family& family : kFamilies) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", family.architecture);
  }
  return list;
}

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
  for (const Family& family : kFamilies) {
    if (named ? fields.Raw("architectures").front() != family.architecture
              : model_type != family.model_type) {
      continue;
    }
    if (!model_type.empty() && model_type != family.model_type) {
      fields.Fail("model_type",
                  fmt::format("with {} it must be \"{}\"", family.architecture, family.model_type));
      return fields.status();
    }
    return &family;
  }
  fields.Fail(named ? "architectures" : "model_type", supported);
  return fields.status();
}

}  // namespace

absl::StatusOr<ModelConfig> LoadModelConfig(const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "config.json";
  ASSIGN_OR_RETURN(const json object, ReadJsonObject(path, kMaxFileBytes));
  JsonFields fields(object, path.string());
  ASSIGN_OR_RETURN(const Family* const family, FindFamily(fields));
  ASSIGN_OR_RETURN(ModelConfig config, family->read(fields));
  config.dtype = ReadDType(fields);
  const std::vector<std::int32_t> bos = ReadTokenIds(fields, "bos_token_id", config.vocab_size);
  if (!bos.empty()) config.bos_token_id = bos.front();
  config.eos_token_ids = ReadTokenIds(fields, "eos_token_id", config.vocab_size);
  RETURN_IF_ERROR(fields.status());

  const std::filesystem::path generation_path = model_dir / "generation_config.json";
  absl::StatusOr<json> generation = ReadJsonObject(generation_path, kMaxFileBytes);
  if (absl::IsNotFound(generation.status())) return config;
  RETURN_IF_ERROR(generation.status());
  JsonFields generation_fields(*generation, generation_path.string());
  if (generation_fields.Has("eos_token_id")) {
    config.eos_token_ids = ReadTokenIds(generation_fields, "eos_token_id", config.vocab_size);
  }
  RETURN_IF_ERROR(generation_fields.status());
  return config;
}

}  // namespace weft
