#include "worker/model/model_config.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/golden.h"
#include "tests/temp_dir.h"

namespace weft {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

json BaseConfig() {
  return json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "rope_theta": 10000.0, "rope_scaling": null})");
}

// A model directory with these two files; no generation_config.json when it is empty.
absl::StatusOr<ModelConfig> LoadText(const std::string& config,
                                     const std::string& generation_config = "") {
  const TempDir dir;
  std::ofstream(dir.path() / "config.json") << config;
  if (!generation_config.empty()) {
    std::ofstream(dir.path() / "generation_config.json") << generation_config;
  }
  return LoadModelConfig(dir.path());
}

using Changes = std::vector<std::pair<std::string, json>>;

absl::StatusOr<ModelConfig> LoadWith(const Changes& changes,
                                     const std::vector<std::string>& without = {}) {
  json config = BaseConfig();
  for (const std::string& key : without) config.erase(key);
  for (const auto& [key, value] : changes) config[key] = value;
  return LoadText(config.dump());
}

void ExpectRefused(const absl::StatusOr<ModelConfig>& config, const std::string& key,
                   const std::string& value) {
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << key << " " << value;
  EXPECT_THAT(std::string(config.status().message()),
              AllOf(HasSubstr("config.json"), HasSubstr(key), HasSubstr(value)));
}

TEST(ModelConfigTest, ReadsTheLayoutOfTransformers5) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama3_rope");
  const auto config = LoadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->num_layers, 3);
  EXPECT_EQ(config->hidden_size, 96);
  EXPECT_EQ(config->intermediate_size, 160);
  EXPECT_EQ(config->num_q_heads, 6);
  EXPECT_EQ(config->num_kv_heads, 2);
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->vocab_size, 384);
  EXPECT_EQ(config->max_position_embeddings, 512);
  EXPECT_EQ(config->rms_norm_eps, 1e-5f);
  EXPECT_EQ(config->dtype, DType::kFloat32);
  EXPECT_FALSE(config->qkv_bias || config->o_bias);
  EXPECT_FALSE(config->mlp_bias);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_EQ(config->bos_token_id, 1);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config->rope, (RopeConfig{.type = RopeType::kLlama3,
                                      .theta = 500000.0,
                                      .factor = 8.0,
                                      .low_freq_factor = 1.0,
                                      .high_freq_factor = 4.0,
                                      .original_max_position_embeddings = 64}));
}

TEST(ModelConfigTest, ReadsTheLayoutOfTransformers4) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_odd");
  const auto config = LoadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope, RopeConfig{.theta = 100000.0});
  EXPECT_EQ(config->dtype, DType::kFloat32);
  EXPECT_EQ(config->num_q_heads, 9);
  EXPECT_TRUE(config->tie_word_embeddings);

  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const auto scaled = LoadWith({{"rope_scaling", llama3}, {"rope_theta", 500000.0}});
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  EXPECT_EQ(scaled->rope.type, RopeType::kLlama3);
  EXPECT_EQ(scaled->rope.theta, 500000.0);
  EXPECT_EQ(scaled->rope.original_max_position_embeddings, 8192);
  EXPECT_EQ(scaled->dtype, DType::kBFloat16);
}

TEST(ModelConfigTest, ReadsThePublishedConfigOfLlama31) {
  const auto config = LoadText(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
    "vocab_size": 128256})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->head_dim, 128);  // hidden_size / num_attention_heads
  EXPECT_EQ(config->num_kv_heads, 8);
  EXPECT_EQ(config->dtype, DType::kBFloat16);
  EXPECT_EQ(config->rope.type, RopeType::kLlama3);
  EXPECT_EQ(config->rope.original_max_position_embeddings, 8192);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(128001, 128008, 128009));
}

TEST(ModelConfigTest, BothLayoutsTogetherMustAgree) {
  const json linear = {{"type", "linear"}, {"factor", 2}};
  const json same = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 10000}};
  const json other = {{"rope_type", "linear"}, {"factor", 3}};
  EXPECT_TRUE(LoadWith({{"rope_scaling", linear}, {"rope_parameters", same}}).ok());
  ExpectRefused(LoadWith({{"rope_scaling", linear}, {"rope_parameters", other}}), "rope_scaling",
                "something else");
}

TEST(ModelConfigTest, KeysInsideRopeParametersWinOverTopLevelOnes) {
  const auto config = LoadWith({{"rope_parameters", {{"rope_theta", 777.0}}}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope.theta, 777.0);
}

TEST(ModelConfigTest, AbsentAndNullKeysGetTheReferencesDefaults) {
  const std::vector<std::string> optional = {
      "num_key_value_heads", "head_dim",     "max_position_embeddings",
      "rms_norm_eps",        "hidden_act",   "torch_dtype",
      "bos_token_id",        "eos_token_id", "rope_theta",
      "rope_scaling",        "model_type"};
  Changes nulls;
  for (const std::string& key : optional) nulls.emplace_back(key, nullptr);
  for (const auto& config : {LoadWith({}, optional), LoadWith(nulls)}) {
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_kv_heads, 8);
    EXPECT_EQ(config->head_dim, 16);
    EXPECT_EQ(config->max_position_embeddings, 2048);
    EXPECT_EQ(config->rms_norm_eps, 1e-6f);
    EXPECT_EQ(config->rope, RopeConfig{});
    EXPECT_EQ(config->rope.theta, 10000.0);
    EXPECT_EQ(config->dtype, DType::kFloat32);
    EXPECT_EQ(config->bos_token_id, std::nullopt);
    EXPECT_THAT(config->eos_token_ids, IsEmpty());
    EXPECT_FALSE(config->qkv_bias || config->o_bias || config->mlp_bias ||
                 config->tie_word_embeddings);
  }
}

TEST(ModelConfigTest, EndOfSequenceOfTheGenerationConfigWins) {
  const auto eos = [](const json& in_config, const std::string& generation) {
    json config = BaseConfig();
    config["eos_token_id"] = in_config;
    const auto loaded = LoadText(config.dump(), generation);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? loaded->eos_token_ids : std::vector<std::int32_t>{-1};
  };
  EXPECT_THAT(eos(2, ""), ElementsAre(2));
  EXPECT_THAT(eos({2, 5}, ""), ElementsAre(2, 5));
  EXPECT_THAT(eos(2, R"({"eos_token_id": 7})"), ElementsAre(7));
  EXPECT_THAT(eos(2, R"({"eos_token_id": [7, 9]})"), ElementsAre(7, 9));
  EXPECT_THAT(eos(2, R"({"eos_token_id": null, "temperature": 0.6})"), ElementsAre(2));
  EXPECT_THAT(eos(2, "{}"), ElementsAre(2));
  for (const char* bad : {R"({"eos_token_id": 320})", R"({"eos_token_id": "2"})",
                          R"({"eos_token_id": [1, -1]})", "[]", "{"}) {
    const auto loaded = LoadText(BaseConfig().dump(), bad);
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("generation_config.json")) << bad;
  }
}

TEST(ModelConfigTest, ReadsYarnWithItsDefaultsAndOldTypeName) {
  const auto config =
      LoadWith({{"rope_scaling",
                 {{"type", "yarn"}, {"factor", 16}, {"beta_fast", nullptr}, {"finetuned", true}}}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope,
            (RopeConfig{
                .type = RopeType::kYarn, .factor = 16.0, .original_max_position_embeddings = 512}));
  const auto full = LoadWith({{"rope_parameters",
                               {{"rope_type", "yarn"},
                                {"rope_theta", 5e4},
                                {"factor", 40},
                                {"beta_fast", 8},
                                {"beta_slow", 2},
                                {"mscale", 1.0},
                                {"mscale_all_dim", 0.707},
                                {"attention_factor", 1.5},
                                {"truncate", false},
                                {"original_max_position_embeddings", 4096}}}});
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_EQ(full->rope, (RopeConfig{.type = RopeType::kYarn,
                                    .theta = 5e4,
                                    .factor = 40.0,
                                    .beta_fast = 8,
                                    .beta_slow = 2,
                                    .attention_factor = 1.5,
                                    .mscale = 1.0,
                                    .mscale_all_dim = 0.707,
                                    .truncate = false,
                                    .original_max_position_embeddings = 4096}));
}

TEST(ModelConfigTest, RefusesRopeItDoesNotCompute) {
  const auto rope = [](const json& object) { return LoadWith({{"rope_scaling", object}}); };
  ExpectRefused(rope({{"type", "dynamic"}, {"factor", 2}}), "rope_type", "dynamic");
  ExpectRefused(rope({{"rope_type", "longrope"}}), "rope_type", "longrope");
  ExpectRefused(rope({{"rope_type", 3}}), "rope_type", "3");
  ExpectRefused(rope({{"type", "linear"}}), "factor", "missing");
  ExpectRefused(rope({{"type", "linear"}, {"factor", 0}}), "factor", "0");
  ExpectRefused(rope({{"type", "linear"}, {"factor", "2"}}), "factor", "\"2\"");
  ExpectRefused(rope({{"type", "linear"}, {"factor", 2}, {"attn_factor", 2}}), "attn_factor", "2");
  ExpectRefused(rope({{"type", "default"}, {"partial_rotary_factor", 0.5}}),
                "partial_rotary_factor", "0.5");
  ExpectRefused(rope({{"type", "default"}, {"mrope_section", {1, 2}}}), "mrope_section", "[1,2]");
  ExpectRefused(rope({{"full_attention", {{"rope_type", "default"}}}}), "full_attention",
                "default");
  ExpectRefused(
      rope({{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}),
      "high_freq_factor", "4");
  ExpectRefused(rope("yarn"), "rope_scaling", "yarn");
  ExpectRefused(LoadWith({{"rope_theta", 0}}), "rope_theta", "0");
  ExpectRefused(
      LoadWith({{"rope_scaling",
                 {{"type", "yarn"}, {"factor", 2}, {"original_max_position_embeddings", 64}}},
                {"original_max_position_embeddings", 128}}),
      "original_max_position_embeddings", "64");
}

TEST(ModelConfigTest, RefusesKeysThatWouldChangeTheResult) {
  const Changes changes = {{"quantization_config", {{"quant_method", "gptq"}}},
                           {"pretraining_tp", 2},
                           {"partial_rotary_factor", 0.5},
                           {"attention_chunk_size", 8192},
                           {"sliding_window", 4096},
                           {"hidden_act", "gelu"},
                           {"layer_types", {"full_attention", "sliding_attention"}},
                           {"rope_interleaved", true},
                           {"final_logit_softcapping", 30.0},
                           {"num_local_experts", 8},
                           {"is_causal", false}};
  for (const auto& [key, value] : changes)
    ExpectRefused(LoadWith({{key, value}}), key, value.dump());
}

TEST(ModelConfigTest, IgnoresKeysThatDoNotMatterAndNeutralValues) {
  const auto config = LoadWith({{"pretraining_tp", 1},
                                {"partial_rotary_factor", 1.0},
                                {"attention_chunk_size", nullptr},
                                {"quantization_config", nullptr},
                                {"sliding_window", 4096},
                                {"use_sliding_window", false},
                                {"layer_types", {"full_attention", "full_attention"}},
                                {"attention_dropout", 0.1},
                                {"initializer_range", 0.02},
                                {"use_cache", false},
                                {"transformers_version", "4.40.1"},
                                {"transformers.js_config", {{"dtype", "q4"}}},
                                {"pad_token_id", -1}});
  EXPECT_TRUE(config.ok()) << config.status();
}

TEST(ModelConfigTest, RefusesValuesOutOfRange) {
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size"}) {
    ExpectRefused(LoadWith({}, {key}), key, "missing");
    for (const json& value :
         {json(0), json(-1), json("128"), json(128.0), json(true), json::array(),
          json(std::int64_t{1} << 40), json(18446744073709551615u)}) {
      ExpectRefused(LoadWith({{key, value}}), key, value.dump());
    }
  }
  ExpectRefused(LoadWith({{"num_key_value_heads", 3}}), "num_key_value_heads", "3");
  ExpectRefused(LoadWith({{"num_key_value_heads", 16}}), "num_key_value_heads", "16");
  ExpectRefused(LoadWith({{"head_dim", 15}}), "head_dim", "15");
  ExpectRefused(LoadWith({{"hidden_size", 100}}, {"head_dim"}), "hidden_size", "100");
  ExpectRefused(LoadWith({{"hidden_size", 24}}, {"head_dim"}), "hidden_size", "24");
  EXPECT_TRUE(LoadWith({{"hidden_size", 100}}).ok());  // head_dim is explicit
  ExpectRefused(LoadWith({{"max_position_embeddings", 0}}), "max_position_embeddings", "0");
  ExpectRefused(LoadWith({{"rms_norm_eps", 0}}), "rms_norm_eps", "0");
  ExpectRefused(LoadWith({{"rms_norm_eps", "1e-5"}}), "rms_norm_eps", "1e-5");
  ExpectRefused(LoadWith({{"attention_bias", "false"}}), "attention_bias", "false");
  ExpectRefused(LoadWith({{"tie_word_embeddings", 1}}), "tie_word_embeddings", "1");
  ExpectRefused(LoadWith({{"torch_dtype", "float64"}}), "torch_dtype", "float64");
  ExpectRefused(LoadWith({{"dtype", "int8"}}), "dtype", "int8");
  ExpectRefused(LoadWith({{"eos_token_id", 320}}), "eos_token_id", "320");
  ExpectRefused(LoadWith({{"bos_token_id", -1}}), "bos_token_id", "-1");
  ExpectRefused(
      LoadWith(
          {{"num_attention_heads", 1 << 20}, {"num_key_value_heads", 1 << 20}, {"head_dim", 256}}),
      "num_attention_heads", "1048576");
  // What attention has no kernel for is refused here, not at the first step.
  for (const int head_dim : {2, 12, 20, 264}) {
    ExpectRefused(LoadWith({{"head_dim", head_dim}}), "head_dim", "multiple of 8");
  }
}

TEST(ModelConfigTest, RefusesOtherArchitecturesAndListsItsOwn) {
  ExpectRefused(LoadWith({{"architectures", {"GemmaForCausalLM"}}, {"model_type", "gemma"}}),
                "GemmaForCausalLM", "LlamaForCausalLM");
  ExpectRefused(LoadWith({{"model_type", "mistral"}}), "model_type", "mistral");
  ExpectRefused(LoadWith({{"model_type", "gemma"}}, {"architectures"}), "gemma",
                "LlamaForCausalLM");
  ExpectRefused(LoadWith({}, {"architectures", "model_type"}), "architectures", "missing");
  for (const json& bad : {json("LlamaForCausalLM"), json::array(), json{1}, json(7)}) {
    ExpectRefused(LoadWith({{"architectures", bad}}), "architectures", bad.dump());
  }
  EXPECT_TRUE(LoadWith({}, {"architectures"}).ok());  // model_type says it
  EXPECT_TRUE(LoadWith({}, {"model_type"}).ok());
}

// A config of another family: Llama's keys, without those that have a default.
absl::StatusOr<ModelConfig> LoadFamily(const std::string& architecture,
                                       const std::string& model_type, const Changes& changes = {},
                                       std::vector<std::string> without = {}) {
  Changes all = {{"architectures", {architecture}}, {"model_type", model_type}};
  all.insert(all.end(), changes.begin(), changes.end());
  return LoadWith(all, without);
}

const Changes kExperts = {
    {"num_local_experts", 6}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 40}};

TEST(ModelConfigTest, EachFamilyHasItsOwnDefaults) {
  struct Case {
    std::string architecture, model_type;
    int num_kv_heads, head_dim;
    double rope_theta;
    float eps;
    std::int64_t window;
    bool qkv_bias, qk_norm;
  };
  for (const Case& c : {Case{"LlamaForCausalLM", "llama", 32, 4, 1e4, 1e-6F, 0, false, false},
                        {"MistralForCausalLM", "mistral", 8, 4, 1e4, 1e-6F, 4096, false, false},
                        {"Qwen2ForCausalLM", "qwen2", 32, 4, 1e4, 1e-6F, 0, true, false},
                        {"Qwen3ForCausalLM", "qwen3", 32, 128, 1e4, 1e-6F, 0, false, true},
                        {"Qwen3MoeForCausalLM", "qwen3_moe", 4, 4, 1e4, 1e-6F, 0, false, true},
                        {"MixtralForCausalLM", "mixtral", 8, 4, 1e6, 1e-5F, 0, false, false}}) {
    SCOPED_TRACE(c.architecture);
    // 32 heads of 8; what is absent is a default, or follows from the others.
    Changes changes = {{"num_attention_heads", 32}, {"hidden_size", 256}};
    if (c.model_type == "qwen3_moe" || c.model_type == "mixtral") {
      changes.insert(changes.end(), kExperts.begin(), kExperts.end());
    }
    const auto config =
        LoadFamily(c.architecture, c.model_type, changes,
                   {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_kv_heads, c.num_kv_heads);
    EXPECT_EQ(config->head_dim, c.head_dim == 4 ? 8 : c.head_dim);
    EXPECT_EQ(config->rope.theta, c.rope_theta);
    EXPECT_EQ(config->rms_norm_eps, c.eps);
    EXPECT_EQ(config->sliding_window, c.window);
    EXPECT_EQ(config->qkv_bias, c.qkv_bias);
    EXPECT_FALSE(config->o_bias || config->mlp_bias);
    EXPECT_EQ(config->qk_norm, c.qk_norm);
  }
}

absl::StatusOr<ModelConfig> LoadQwen3Moe(const Changes& changes,
                                         const std::vector<std::string>& without = {}) {
  Changes all = kExperts;
  all.insert(all.end(), changes.begin(), changes.end());
  return LoadFamily("Qwen3MoeForCausalLM", "qwen3_moe", all, without);
}

TEST(ModelConfigTest, MixtralsExpertsAreWeighedAmongThemselvesInEveryLayer) {
  const auto config = LoadFamily("MixtralForCausalLM", "mixtral", kExperts);
  ASSERT_TRUE(config.ok()) << config.status();
  const MoeConfig& moe = *config->moe;
  EXPECT_EQ(moe.num_experts, 6);
  EXPECT_EQ(moe.experts_per_token, 2);
  EXPECT_EQ(moe.intermediate_size, 160);  // intermediate_size, whatever moe_intermediate_size says
  EXPECT_TRUE(moe.normalize && config->HasExperts(0) && config->HasExperts(1));
  ExpectRefused(LoadFamily("MixtralForCausalLM", "mixtral"), "num_local_experts", "missing");
}

TEST(ModelConfigTest, Qwen3MoeReadsExpertsUnderOldAndNewNames) {
  const auto new_name = LoadQwen3Moe({{"norm_topk_prob", true}});
  ASSERT_TRUE(new_name.ok()) << new_name.status();
  EXPECT_EQ(new_name->moe->num_experts, 6);
  EXPECT_EQ(new_name->moe->intermediate_size, 40);
  EXPECT_TRUE(new_name->moe->normalize);
  const auto old_name = LoadQwen3Moe({{"num_local_experts", nullptr}, {"num_experts", 7}});
  ASSERT_TRUE(old_name.ok()) << old_name.status();
  EXPECT_EQ(old_name->moe->num_experts, 7);
  EXPECT_FALSE(old_name->moe->normalize);  // when norm_topk_prob is absent
  EXPECT_TRUE(LoadQwen3Moe({{"num_experts", 6}}).ok());
  ExpectRefused(LoadQwen3Moe({{"num_experts", 7}}), "num_local_experts", "6");
}

TEST(ModelConfigTest, Qwen3MoeHasDenseLayersWhereItsConfigSays) {
  EXPECT_TRUE(LoadQwen3Moe({})->HasExperts(0));
  const auto only = LoadQwen3Moe({{"mlp_only_layers", {0}}});
  EXPECT_TRUE(!only->HasExperts(0) && only->HasExperts(1));
  const auto step = LoadQwen3Moe({{"decoder_sparse_step", 2}});
  EXPECT_TRUE(!step->HasExperts(0) && step->HasExperts(1));
  EXPECT_FALSE(LoadQwen3Moe({{"decoder_sparse_step", 3}})->moe.has_value());
  ExpectRefused(LoadQwen3Moe({{"mlp_only_layers", {2}}}), "mlp_only_layers", "2");
  ExpectRefused(LoadQwen3Moe({{"mlp_only_layers", 1}}), "mlp_only_layers", "1");
  ExpectRefused(LoadQwen3Moe({{"decoder_sparse_step", 0}}), "decoder_sparse_step", "0");
}

TEST(ModelConfigTest, RefusesExpertCountsThatCannotBe) {
  ExpectRefused(LoadQwen3Moe({{"num_experts_per_tok", 7}}), "num_experts_per_tok", "7");
  ExpectRefused(LoadQwen3Moe({{"num_experts_per_tok", 0}}), "num_experts_per_tok", "0");
  ExpectRefused(LoadQwen3Moe({{"num_local_experts", 4097}}), "num_local_experts", "4097");
  ExpectRefused(LoadQwen3Moe({{"moe_intermediate_size", -1}}), "moe_intermediate_size", "-1");
  ExpectRefused(LoadQwen3Moe({{"n_shared_experts", 1}}), "n_shared_experts", "1");
  ExpectRefused(LoadQwen3Moe({{"shared_expert_intermediate_size", 64}}),
                "shared_expert_intermediate_size", "64");
}

absl::StatusOr<ModelConfig> LoadDeepseek(int version, const Changes& changes = {}) {
  Changes all = {
      {"num_key_value_heads", 8}, {"q_lora_rank", nullptr},    {"kv_lora_rank", 32},
      {"qk_nope_head_dim", 16},   {"qk_rope_head_dim", 8},     {"v_head_dim", 24},
      {"n_routed_experts", 8},    {"num_experts_per_tok", 3},  {"moe_intermediate_size", 40},
      {"n_shared_experts", 2},    {"first_k_dense_replace", 1}};
  all.insert(all.end(), changes.begin(), changes.end());
  return LoadFamily(version == 2 ? "DeepseekV2ForCausalLM" : "DeepseekV3ForCausalLM",
                    version == 2 ? "deepseek_v2" : "deepseek_v3", all);
}

TEST(ModelConfigTest, MlaCachesOneLatentWhateverHeadDimSays) {
  for (int version : {2, 3}) {
    const auto config = LoadDeepseek(version, {{"head_dim", 8}, {"n_group", 1}, {"topk_group", 1}});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_q_heads, 8);
    EXPECT_EQ(config->num_kv_heads, 1);
    EXPECT_EQ(config->head_dim, 40);
    EXPECT_EQ(config->value_dim, 32);
    EXPECT_EQ(config->rotary_dim, 8);
    EXPECT_EQ(config->mla->q_lora_rank, 0);
    EXPECT_TRUE(config->mla->rope_interleave);
    EXPECT_EQ(config->moe->shared_intermediate_size, 80);
    EXPECT_TRUE(!config->HasExperts(0) && config->HasExperts(1));
    EXPECT_FLOAT_EQ(config->attention_scale, 1 / std::sqrt(24.0F));
  }
  EXPECT_EQ(LoadDeepseek(2, {{"q_lora_rank", 48}})->mla->q_lora_rank, 48);
  ExpectRefused(LoadDeepseek(2, {{"num_key_value_heads", 2}}), "num_key_value_heads", "2");
  ExpectRefused(LoadDeepseek(2, {{"qk_rope_head_dim", 9}}), "qk_rope_head_dim", "9");
  ExpectRefused(LoadDeepseek(2, {{"kv_lora_rank", 36}}), "kv_lora_rank", "36");
  ExpectRefused(LoadDeepseek(2, {{"kv_lora_rank", 1024}}), "kv_lora_rank", "1024");
}

TEST(ModelConfigTest, YarnStretchesTheScaleOfMlaAlone) {
  const json yarn = {
      {"rope_type", "yarn"}, {"factor", 40}, {"mscale", 0.707}, {"mscale_all_dim", 0.5}};
  const float m = 0.1F * 0.5F * std::log(40.0F) + 1;
  EXPECT_FLOAT_EQ(LoadDeepseek(2, {{"rope_scaling", yarn}})->attention_scale,
                  m * m / std::sqrt(24.0F));
  EXPECT_FLOAT_EQ(LoadWith({{"rope_scaling", yarn}})->attention_scale, 0.25F);
  const json linear = {{"rope_type", "linear"}, {"factor", 40}, {"mscale_all_dim", 0.5}};
  EXPECT_FLOAT_EQ(LoadDeepseek(2, {{"rope_scaling", linear}})->attention_scale,
                  m * m / std::sqrt(24.0F));
}

TEST(ModelConfigTest, DeepseekRoutesByVersionAndMethod) {
  const auto greedy = LoadDeepseek(2, {{"norm_topk_prob", true}, {"routed_scaling_factor", 2.0}});
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_EQ(greedy->moe->group_score, kernels::GroupScore::kNone);
  EXPECT_FALSE(greedy->moe->normalize || greedy->moe->score_bias);  // as in the reference
  EXPECT_EQ(greedy->moe->scale, 2.0F);
  const auto limited =
      LoadDeepseek(2, {{"topk_method", "group_limited_greedy"}, {"n_group", 4}, {"topk_group", 2}});
  ASSERT_TRUE(limited.ok()) << limited.status();
  EXPECT_EQ(limited->moe->group_score, kernels::GroupScore::kBest);
  EXPECT_EQ(limited->moe->num_groups, 4);
  EXPECT_EQ(limited->moe->groups_per_token, 2);
  const auto v3 = LoadDeepseek(3);
  ASSERT_TRUE(v3.ok()) << v3.status();
  EXPECT_EQ(v3->moe->score, kernels::ExpertScore::kSigmoid);
  EXPECT_EQ(v3->moe->group_score, kernels::GroupScore::kSumOfBestTwo);
  EXPECT_EQ(v3->moe->num_groups, 8);  // n_group's default
  EXPECT_EQ(v3->moe->groups_per_token, 4);
  EXPECT_EQ(v3->moe->scale, 2.5F);
  EXPECT_TRUE(v3->moe->normalize && v3->moe->score_bias);

  ExpectRefused(LoadDeepseek(2, {{"topk_method", "noaux_tc"}}), "topk_method", "noaux_tc");
  ExpectRefused(LoadDeepseek(3, {{"topk_method", "greedy"}}), "topk_method", "greedy");
  ExpectRefused(LoadDeepseek(2, {{"scoring_func", "sigmoid"}}), "scoring_func", "sigmoid");
  ExpectRefused(LoadDeepseek(3, {{"n_group", 3}}), "n_group", "3");
  ExpectRefused(LoadDeepseek(3, {{"n_group", 4}, {"topk_group", 5}}), "topk_group", "5");
  ExpectRefused(LoadDeepseek(3, {{"n_group", 8}, {"topk_group", 2}}), "num_experts_per_tok", "3");
  ExpectRefused(LoadDeepseek(3, {{"moe_layer_freq", 2}}), "moe_layer_freq", "2");
  ExpectRefused(LoadDeepseek(3, {{"mlp_bias", true}}), "mlp_bias", "true");
}

TEST(ModelConfigTest, ReadsPublishedConfigs) {
  struct Case {
    const char* name;
    int num_layers, kv_floats;  // a token of a layer caches
  };
  for (const Case& c :
       {Case{"deepseek-r1", 61, 576}, Case{"deepseek-v2-lite", 27, 576}, Case{"kimi-k2", 61, 576},
        Case{"llama-3.1-8b", 32, 2048}, Case{"qwen3-235b-a22b", 94, 1024}}) {
    SCOPED_TRACE(c.name);
    WEFT_GOLDEN_OR_SKIP(path, std::string("configs/") + c.name + ".json");
    std::ifstream in(path);
    const auto config = LoadText(std::string(std::istreambuf_iterator<char>(in), {}));
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_layers, c.num_layers);
    EXPECT_EQ(config->num_kv_heads * config->head_dim * (config->mla.has_value() ? 1 : 2),
              c.kv_floats);
  }
}

TEST(ModelConfigTest, AttentionBiasMeansWhatItMeansInItsFamily) {
  const auto bias = [](const char* architecture, const char* model_type) {
    return LoadFamily(architecture, model_type, {{"attention_bias", true}});
  };
  for (const auto& config :
       {bias("LlamaForCausalLM", "llama"), bias("Qwen3ForCausalLM", "qwen3")}) {
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_TRUE(config->qkv_bias && config->o_bias);
  }
  ExpectRefused(bias("MistralForCausalLM", "mistral"), "attention_bias", "true");
  ExpectRefused(LoadFamily("Qwen2ForCausalLM", "qwen2", {{"mlp_bias", true}}), "mlp_bias", "true");
}

TEST(ModelConfigTest, MistralsWindowIsOffOnlyWhenItIsNull) {
  const auto window = [](const Changes& changes) {
    return LoadFamily("MistralForCausalLM", "mistral", changes);
  };
  EXPECT_EQ(window({})->sliding_window, 4096);
  EXPECT_EQ(window({{"sliding_window", nullptr}})->sliding_window, 0);
  const auto seven = window({{"sliding_window", 7}});
  EXPECT_EQ(seven->sliding_window, 7);
  EXPECT_TRUE(seven->HasWindow(0) && seven->HasWindow(1));
  ExpectRefused(window({{"sliding_window", 0}}), "sliding_window", "0");
  ExpectRefused(window({{"layer_types", {"full_attention", "sliding_attention"}}}), "layer_types",
                "full_attention");
}

TEST(ModelConfigTest, QwensWindowNeedsUseSlidingWindowAndStartsAtMaxWindowLayers) {
  const auto window = [](const Changes& changes) {
    return LoadFamily("Qwen2ForCausalLM", "qwen2", changes);
  };
  EXPECT_EQ(window({{"sliding_window", 7}})->sliding_window, 0);
  EXPECT_EQ(window({{"sliding_window", 7}, {"use_sliding_window", true}})->sliding_window, 0);
  const auto upper = window({{"sliding_window", 7},
                             {"use_sliding_window", true},
                             {"max_window_layers", 1},
                             {"layer_types", {"full_attention", "sliding_attention"}}});
  ASSERT_TRUE(upper.ok()) << upper.status();
  EXPECT_EQ(upper->sliding_window, 7);
  EXPECT_TRUE(!upper->HasWindow(0) && upper->HasWindow(1));
  ExpectRefused(window({{"sliding_window", 7},
                        {"use_sliding_window", true},
                        {"max_window_layers", 0},
                        {"layer_types", {"full_attention", "sliding_attention"}}}),
                "layer_types", "full_attention");
}

TEST(ModelConfigTest, RefusesTextThatIsNoPlainJsonObject) {
  ExpectRefused(LoadText(""), "not valid JSON", "");
  ExpectRefused(LoadText("[1, 2]"), "[1,2]", "object");
  ExpectRefused(LoadText("null"), "null", "object");
  ExpectRefused(LoadText(R"({"hidden_size": 1, "hidden_size": 2})"), "hidden_size", "twice");
  ExpectRefused(LoadText("{\"a\xff\": 1}"), "UTF-8", "");
  ExpectRefused(LoadText(R"({"a": 1e999})"), "not valid JSON", "");
  ExpectRefused(LoadText(R"({"a": 1} trailing)"), "not valid JSON", "");
  const std::string deep(100000, '[');
  ExpectRefused(LoadText("{\"a\":" + deep), "levels deep", "32");
  ExpectRefused(LoadText(std::string(17 << 20, ' ')), "17825792 bytes", "16777216");

  const TempDir empty;
  EXPECT_EQ(LoadModelConfig(empty.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadModelConfig(empty.path() / "no").status().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directory(empty.path() / "config.json");
  EXPECT_EQ(LoadModelConfig(empty.path()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace weft
