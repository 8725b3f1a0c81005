#include "worker/model/decoder_weights.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/stream.h"
#include "tests/golden.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig Experts() {
  ModelConfig config{.architecture = "MixtralForCausalLM",
                     .num_layers = 2,
                     .intermediate_size = 3,
                     .num_q_heads = 8,
                     .num_kv_heads = 8,
                     .vocab_size = 100};
  config.moe = {
      .num_experts = 4, .experts_per_token = 2, .intermediate_size = 6, .layers = {true, true}};
  return config;
}

std::string ErrorOf(const ModelConfig& config, int tp, bool expert_parallel) {
  const auto layout = ShardLayout::Create(
      {.tensor_parallel_size = tp},
      {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, 0);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return std::string(CheckRanksCanShare(config, *layout, expert_parallel).message());
}

TEST(CheckRanksCanShareTest, CountsWhatTheRanksDivide) {
  ModelConfig config = Experts();
  EXPECT_EQ(ErrorOf(config, 6, false), "");  // a column of each expert a rank
  EXPECT_THAT(ErrorOf(config, 7, false),
              AllOf(HasSubstr("7"), HasSubstr("width of this model is 6")));
  EXPECT_EQ(ErrorOf(config, 4, true), "");
  EXPECT_THAT(ErrorOf(config, 5, true),
              AllOf(HasSubstr("5"), HasSubstr("experts of this model is 4")));
  config.moe->shared_intermediate_size = 5;
  EXPECT_EQ(ErrorOf(config, 5, false), "");
  EXPECT_THAT(ErrorOf(config, 6, false), HasSubstr("shared experts' width of this model is 5"));
  config.moe->layers[1] = false;  // now some layer has the dense MLP
  EXPECT_EQ(ErrorOf(config, 3, false), "");
  EXPECT_THAT(ErrorOf(config, 4, false), HasSubstr("intermediate_size of this model is 3"));
  config.vocab_size = 2;
  EXPECT_THAT(ErrorOf(config, 3, false), HasSubstr("vocab_size of this model is 2"));
}

TEST(CheckRanksCanShareTest, RefusesExpertParallelismWithoutExperts) {
  ModelConfig config = Experts();
  config.moe.reset();
  EXPECT_EQ(ErrorOf(config, 2, false), "");
  EXPECT_THAT(ErrorOf(config, 2, true),
              AllOf(HasSubstr("--enable-expert-parallel"), HasSubstr("no experts")));
}

TEST(MergedDimTest, IsTheFewerOfLatentAndValueWhereRanksMerge) {
  ModelConfig config = Experts();
  config.value_dim = 32;
  const auto of = [&](int dcp) {
    const auto layout = ShardLayout::Create(
        {.tensor_parallel_size = 2, .decode_context_parallel_size = dcp}, {8, 1}, 0);
    return MergedDim(config, *layout);
  };
  EXPECT_EQ(of(2), 32);  // not MLA
  config.mla = {.v_head_dim = 24};
  EXPECT_EQ(of(1), 32);  // nothing is sent
  EXPECT_EQ(of(2), 24);
  config.mla->v_head_dim = 48;
  EXPECT_EQ(of(2), 32);
}

// Every expert and every head is on as many ranks as it should be: what the ranks hold together is
// the checkpoint, counted in packed outputs.
// Scales are of groups of 32 inputs, which ranks may not cut in two.
TEST(CheckQuantGroupsTest, SaysWhichShareWouldEndWithinAGroup) {
  const auto error_of = [](const ModelConfig& config, int tp, bool expert_parallel = false) {
    const auto layout = ShardLayout::Create(
        {.tensor_parallel_size = tp},
        {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, 0);
    EXPECT_TRUE(layout.ok()) << layout.status();
    return std::string(CheckQuantGroups(config, *layout, expert_parallel).message());
  };
  ModelConfig config = Experts();
  config.moe.reset();
  config.value_dim = 32;
  config.intermediate_size = 192;
  EXPECT_EQ(error_of(config, 1), "");
  EXPECT_EQ(error_of(config, 2), "");
  EXPECT_EQ(error_of(config, 3), "");  // 8 heads over 3 ranks: of 32 values each
  EXPECT_THAT(error_of(config, 4), AllOf(HasSubstr("intermediate_size"), HasSubstr("48 of 192")));
  config.value_dim = 16;  // 2, 3 and 3 heads
  EXPECT_THAT(error_of(config, 3), AllOf(HasSubstr("the heads' values"), HasSubstr("80 of 128")));
  config.value_dim = 7;
  EXPECT_EQ(error_of(config, 1), "") << "a last group may be short";

  config = Experts();
  config.value_dim = 32;
  config.intermediate_size = 64;
  config.moe->intermediate_size = 96;
  EXPECT_THAT(error_of(config, 2), AllOf(HasSubstr("an expert's width"), HasSubstr("48 of 96")));
  EXPECT_EQ(error_of(config, 2, /*expert_parallel=*/true), "");
  config.moe->intermediate_size = 128;
  EXPECT_EQ(error_of(config, 2), "");
  config.moe->shared_intermediate_size = 100;
  EXPECT_THAT(error_of(config, 2),
              AllOf(HasSubstr("the shared experts' width"), HasSubstr("50 of 100")));
}

TEST(LoadDecoderWeightsTest, RanksShareOutExpertsWholeOrByWidth) {
  WEFT_GOLDEN_OR_SKIP(dir, "deepseek_v2_lite");
  const auto config = LoadModelConfig(dir);
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(config.ok() && checkpoint.ok()) << config.status() << checkpoint.status();
  kernels::CpuStream stream(1);
  for (const bool expert_parallel : {false, true}) {
    int experts = 0;
    int columns = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const auto layout = ShardLayout::Create({.tensor_parallel_size = 3}, {4, 1}, rank);
      const auto weights =
          LoadDecoderWeights(*config, **checkpoint, *layout, DType::kFloat32,
                             WeightFormat::kFloat32, expert_parallel, stream, [](int) {});
      ASSERT_TRUE(weights.ok()) << weights.status();
      EXPECT_TRUE(weights->layers[0].moe.down.empty());  // a dense layer
      const MoeWeights& moe = weights->layers[1].moe;
      if (expert_parallel) {
        EXPECT_EQ(moe.first_expert, experts);
      }
      experts += static_cast<int>(moe.down.size());
      columns += static_cast<int>(moe.down.size()) * moe.down[0].in_features();
      EXPECT_EQ(moe.router.out_features(), 8);
      EXPECT_GT(weights->layers[1].down.in_features(), 0);  // of the shared experts
    }
    EXPECT_EQ(experts, expert_parallel ? 8 : 3 * 8);
    EXPECT_EQ(columns, 8 * 24);
  }
}

}  // namespace
}  // namespace weft
