#include <algorithm>

#include "fmt/format.h"
#include "kernels/attention.h"
#include "worker/model/config_fields.h"

// What a row of the table of families cannot say: experts, and latent attention.

namespace weft {
namespace {

using nlohmann::json;

constexpr std::int32_t kMaxExperts = 1 << 12;
constexpr double kMaxScale = 1e6;

// Experts and how many of them a token gets, by the keys of the family.
void ReadExpertCounts(JsonFields& fields, const std::string& num_experts_key, MoeConfig& moe) {
  moe.num_experts = Dimension(fields, num_experts_key);
  moe.experts_per_token = Dimension(fields, "num_experts_per_tok");
  if (moe.num_experts > kMaxExperts) {
    fields.Fail(num_experts_key, fmt::format("it must be at most {}", kMaxExperts));
  }
  if (moe.experts_per_token > moe.num_experts) {
    fields.Fail("num_experts_per_tok",
                fmt::format("it must be at most {}, {}", num_experts_key, moe.num_experts));
  }
}

void ReadMla(JsonFields& fields, ModelConfig& config) {
  MlaConfig& mla = config.mla.emplace();
  const auto dimension = [&](const char* key, std::int64_t fallback) {
    return static_cast<std::int32_t>(fields.Int(key, 1, kMaxDimension, fallback));
  };
  if (!fields.IsNull("q_lora_rank")) mla.q_lora_rank = dimension("q_lora_rank", 1536);
  mla.kv_lora_rank = dimension("kv_lora_rank", 512);
  mla.qk_nope_head_dim = dimension("qk_nope_head_dim", 128);
  mla.qk_rope_head_dim = dimension("qk_rope_head_dim", 64);
  mla.v_head_dim = dimension("v_head_dim", 128);
  mla.rope_interleave = fields.Bool("rope_interleave", true);
  if (mla.qk_rope_head_dim % 2 != 0) fields.Fail("qk_rope_head_dim", "it must be even");
  const std::int64_t cached = std::int64_t{mla.kv_lora_rank} + mla.qk_rope_head_dim;
  if (cached % 8 != 0 || cached > kernels::kMaxLatentDim) {
    fields.Fail("kv_lora_rank",
                fmt::format("with qk_rope_head_dim, {}, it must add up to a multiple "
                            "of 8, at most {}",
                            mla.qk_rope_head_dim, kernels::kMaxLatentDim));
  }
  // The widest of what a head has, times the heads, is a dimension, too.
  const std::int64_t widest = std::max<std::int64_t>(
      {mla.qk_head_dim(), std::int64_t{mla.qk_nope_head_dim} + mla.v_head_dim, cached});
  if (config.num_q_heads * widest > kMaxDimension) {
    fields.Fail("num_attention_heads",
                fmt::format("times {} it must be at most {}", widest, kMaxDimension));
  }
  if (config.num_kv_heads != config.num_q_heads) {
    fields.Fail("num_key_value_heads",
                fmt::format("with MLA it must be num_attention_heads, {}", config.num_q_heads));
  }
  config.num_kv_heads = 1;
  config.head_dim = static_cast<std::int32_t>(cached);
  config.value_dim = mla.kv_lora_rank;
  config.rotary_dim = mla.qk_rope_head_dim;
}

void ReadDeepseekExperts(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe.emplace();
  ReadExpertCounts(fields, "n_routed_experts", moe);
  moe.intermediate_size = Dimension(fields, "moe_intermediate_size");
  const std::int64_t shared =
      fields.Int("n_shared_experts", 1, kMaxExperts) * moe.intermediate_size;
  if (shared > kMaxDimension) {
    fields.Fail("n_shared_experts", fmt::format("times moe_intermediate_size, {}, it must be at "
                                                "most {}",
                                                moe.intermediate_size, kMaxDimension));
  }
  moe.shared_intermediate_size = static_cast<std::int32_t>(shared);
}

void ReadDenseLayers(JsonFields& fields, std::int64_t fallback, ModelConfig& config) {
  const std::int64_t dense = fields.Int("first_k_dense_replace", 0, kMaxLayers, fallback);
  for (std::int32_t i = 0; i < config.num_layers; ++i) config.moe->layers.push_back(i >= dense);
}

void ReadExpertGroups(JsonFields& fields, MoeConfig& moe) {
  if (moe.num_groups > kernels::kMaxExpertGroups || moe.num_experts % moe.num_groups != 0) {
    fields.Fail("n_group", fmt::format("it must be at most {} and divide n_routed_experts, {}",
                                       kernels::kMaxExpertGroups, moe.num_experts));
    return;
  }
  if (moe.groups_per_token > moe.num_groups) {
    fields.Fail("topk_group", fmt::format("it must be at most n_group, {}", moe.num_groups));
  }
  if (moe.experts_per_token > moe.groups_per_token * (moe.num_experts / moe.num_groups)) {
    fields.Fail("num_experts_per_tok",
                fmt::format("it must be at most {}, the experts of topk_group groups",
                            moe.groups_per_token * (moe.num_experts / moe.num_groups)));
  }
}

void CheckFixed(JsonFields& fields, const std::string& key, std::string_view value) {
  if (fields.String(key, value) != value) {
    fields.Fail(key, fmt::format("with this architecture only \"{}\" is supported", value));
  }
}

}  // namespace

void ReadMixtralExperts(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe.emplace();
  ReadExpertCounts(fields, "num_local_experts", moe);
  moe.intermediate_size = config.intermediate_size;
  moe.layers.assign(config.num_layers, true);
  moe.normalize = true;
  moe.block = "block_sparse_moe";
  moe.gate = "w1";
  moe.up = "w3";
  moe.down = "w2";
}

void ReadQwen3Experts(JsonFields& fields, ModelConfig& config) {
  MoeConfig& moe = config.moe.emplace();
  const bool both = fields.Has("num_experts") && fields.Has("num_local_experts");
  if (both && fields.Raw("num_experts") != fields.Raw("num_local_experts")) {
    fields.Fail("num_local_experts", "num_experts says something else");
  }
  const bool old_key = fields.Has("num_experts");  // of transformers 4
  ReadExpertCounts(fields, old_key ? "num_experts" : "num_local_experts", moe);
  moe.intermediate_size = Dimension(fields, "moe_intermediate_size");
  moe.normalize = fields.Bool("norm_topk_prob", false);
  const std::int64_t step = fields.Int("decoder_sparse_step", 1, kMaxLayers, 1);
  for (std::int32_t i = 0; i < config.num_layers; ++i) moe.layers.push_back((i + 1) % step == 0);
  if (!fields.Has("mlp_only_layers")) return;
  if (!fields.Raw("mlp_only_layers").is_array())
    fields.Fail("mlp_only_layers", "it must be a list");
  for (const json& layer : fields.Raw("mlp_only_layers")) {
    if (!layer.is_number_unsigned() || layer >= config.num_layers) {
      fields.Fail("mlp_only_layers",
                  fmt::format("each must be a layer, in [0, {})", config.num_layers));
      return;
    }
    moe.layers[layer.get<std::size_t>()] = false;
  }
}

void ReadDeepseekV2(JsonFields& fields, ModelConfig& config) {
  ReadMla(fields, config);
  ReadDeepseekExperts(fields, config);
  if (!fields.status().ok()) return;
  MoeConfig& moe = *config.moe;
  ReadDenseLayers(fields, 0, config);
  CheckFixed(fields, "scoring_func", "softmax");
  if (fields.Has("rope_interleave") && !config.mla->rope_interleave) {
    fields.Fail("rope_interleave", "with this architecture only true is supported");
  }
  // norm_topk_prob is left alone, as in the reference.
  moe.scale = static_cast<float>(fields.Real("routed_scaling_factor", 0, kMaxScale, 1.0));
  const std::string method = fields.String("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    moe.group_score = kernels::GroupScore::kBest;
    moe.num_groups = Dimension(fields, "n_group");
    moe.groups_per_token = Dimension(fields, "topk_group");
    ReadExpertGroups(fields, moe);
  } else if (method != "greedy") {
    fields.Fail("topk_method", "it must be greedy or group_limited_greedy");
  }
}

void ReadDeepseekV3(JsonFields& fields, ModelConfig& config) {
  ReadMla(fields, config);
  ReadDeepseekExperts(fields, config);
  if (!fields.status().ok()) return;
  MoeConfig& moe = *config.moe;
  ReadDenseLayers(fields, 3, config);
  CheckFixed(fields, "scoring_func", "sigmoid");
  CheckFixed(fields, "topk_method", "noaux_tc");
  moe.score = kernels::ExpertScore::kSigmoid;
  moe.score_bias = true;
  moe.group_score = kernels::GroupScore::kSumOfBestTwo;
  moe.num_groups = static_cast<std::int32_t>(fields.Int("n_group", 1, kMaxDimension, 8));
  moe.groups_per_token = static_cast<std::int32_t>(fields.Int("topk_group", 1, kMaxDimension, 4));
  ReadExpertGroups(fields, moe);
  moe.normalize = fields.Bool("norm_topk_prob", true);
  moe.scale = static_cast<float>(fields.Real("routed_scaling_factor", 0, kMaxScale, 2.5));
}

}  // namespace weft
