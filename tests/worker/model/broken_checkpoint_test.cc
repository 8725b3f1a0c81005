#include <cstdlib>
#include <fstream>
#include <string>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/base/status_macros.h"
#include "tests/golden.h"
#include "tests/temp_dir.h"
#include "worker/model/checkpoint_check.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"

namespace weft {
namespace {

// All that a worker checks before it packs a weight.
absl::Status Load(const std::filesystem::path& dir) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(dir));
  ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(dir));
  RETURN_IF_ERROR(CheckTensors(config, *checkpoint));
  return checkpoint->Vector("model.norm.weight", config.hidden_size, 0, config.hidden_size)
      .status();
}

class BrokenCheckpointTest : public testing::TestWithParam<const char*> {};

// tests/data/break_checkpoint.py writes the variants and says of each what must happen.
TEST_P(BrokenCheckpointTest, EachVariantIsAsItsIndexSays) {
  WEFT_GOLDEN_OR_SKIP(good, GetParam());
  WEFT_GOLDEN_OR_SKIP(script, "break_checkpoint.py");
  const TempDir out;
  const std::string command = fmt::format("python3 '{}' '{}' '{}' > /dev/null", script.string(),
                                          good.string(), out.path().string());
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  std::ifstream in(out.path() / "index.json");
  const auto index = nlohmann::json::parse(in);
  ASSERT_GE(index.size(), 50u);
  for (const auto& [name, variant] : index.items()) {
    SCOPED_TRACE(fmt::format("{}: {}", name, variant.at("what").get<std::string>()));
    const auto mentions = variant.at("mentions").get<std::string>();
    const absl::Status status = Load(out.path() / name);
    // The tokenizer is the router's.
    if (mentions == "tokenizer.json" || variant.at("expect") == "load") {
      EXPECT_TRUE(status.ok()) << status;
    } else if (variant.at("expect") == "either" && status.ok()) {
      // A weight that is not finite: packing the weights finds it.
      EXPECT_EQ(name, "nan_weight");
    } else {
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(mentions));
    }
  }
}

TEST(CheckTensorsTest, NamesTheKeyThatAsksForAnAbsentTensor) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_odd");  // tied embeddings, so no lm_head
  const auto config = LoadModelConfig(dir);
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(config.ok() && checkpoint.ok()) << config.status() << checkpoint.status();
  ASSERT_TRUE(CheckTensors(*config, **checkpoint).ok());
  const auto message = [&](void (*change)(ModelConfig&)) {
    ModelConfig changed = *config;
    change(changed);
    return std::string(CheckTensors(changed, **checkpoint).message());
  };
  using testing::AllOf;
  using testing::HasSubstr;
  EXPECT_THAT(message([](ModelConfig& c) { c.tie_word_embeddings = false; }),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("tie_word_embeddings is false")));
  EXPECT_THAT(message([](ModelConfig& c) { c.qkv_bias = c.o_bias = true; }),
              AllOf(HasSubstr("q_proj.bias"), HasSubstr("attention_bias is true")));
  EXPECT_THAT(message([](ModelConfig& c) { c.mlp_bias = true; }),
              AllOf(HasSubstr("gate_proj.bias"), HasSubstr("mlp_bias is true")));
  EXPECT_THAT(message([](ModelConfig& c) { c.num_layers = 9; }),
              AllOf(HasSubstr("model.layers.2."), HasSubstr("num_hidden_layers is 9")));
  EXPECT_THAT(message([](ModelConfig& c) { c.num_kv_heads = 1; }),
              AllOf(HasSubstr("k_proj"), HasSubstr("[48, 144]"), HasSubstr("[16, 144]"),
                    HasSubstr("num_key_value_heads")));
  EXPECT_THAT(message([](ModelConfig& c) { c.intermediate_size = 7; }),
              AllOf(HasSubstr("gate_proj"), HasSubstr("intermediate_size")));
}

TEST(CheckTensorsTest, RefusesWeightsThatTheModelWouldLeaveOut) {
  WEFT_GOLDEN_OR_SKIP(dir, "qwen2");
  const auto config = LoadModelConfig(dir);
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(config.ok() && checkpoint.ok()) << config.status() << checkpoint.status();
  ASSERT_TRUE(CheckTensors(*config, **checkpoint).ok());
  ModelConfig llama = *config;
  llama.qkv_bias = false;
  EXPECT_THAT(std::string(CheckTensors(llama, **checkpoint).message()),
              testing::HasSubstr("k_proj.bias"));
  ModelConfig fewer_layers = llama;
  fewer_layers.qkv_bias = true;
  fewer_layers.num_layers = 2;
  EXPECT_TRUE(CheckTensors(fewer_layers, **checkpoint).ok());  // layer 2 is not run
}

INSTANTIATE_TEST_SUITE_P(Committed, BrokenCheckpointTest,
                         testing::Values("llama_gqa", "llama3_rope"));
INSTANTIATE_TEST_SUITE_P(Families, BrokenCheckpointTest,
                         testing::Values("qwen2", "qwen3", "mistral_window", "qwen3_moe_norm",
                                         "deepseek_v2_lite", "deepseek_v3_noqlora"));

}  // namespace
}  // namespace weft
