// weft plan: the published capacities, the layouts that others allow, and counts that are those of
// what is loaded.

#include <algorithm>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/worker/family_checkpoints.h"
#include "worker/model/decoder_weights.h"
#include "worker/plan/layout_plan.h"
#include "worker/plan/plan_text.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

constexpr double kGib = 1024.0 * 1024 * 1024;

std::filesystem::path ConfigPath(std::string_view name) {
  return std::filesystem::path(WEFT_SOURCE_DIR "/../shared/goldens/configs") / name;
}

std::optional<ModelConfig> Published(std::string_view name) {
  if (!std::filesystem::exists(ConfigPath(name))) return std::nullopt;
  auto config = DescribeModel(ConfigPath(name));
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

#define WEFT_PUBLISHED_OR_SKIP(var, name)                                                        \
  const std::optional<ModelConfig> var##_read = Published(name);                                 \
  if (!var##_read && std::getenv("CI") != nullptr) FAIL() << "config " << name << " is missing"; \
  if (!var##_read) GTEST_SKIP() << "config " << name << " is missing";                           \
  const ModelConfig& var = *var##_read

LayoutPlan PlanOne(const ModelConfig& config, std::int32_t tp, std::int32_t dcp,
                   PlanOptions options) {
  options.tensor_parallel_size = tp;
  options.decode_context_parallel_size = dcp;
  const auto plans = PlanLayouts(config, options);
  EXPECT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ(plans->size(), 1U);
  return plans->front();
}

TEST(PlanTest, KimiHoldsWhatWasPublished) {
  WEFT_PUBLISHED_OR_SKIP(kimi, "kimi-k2.json");
  PlanOptions options{.kv_bytes = 2, .contexts = {65536}};
  options.kv_memory_bytes = static_cast<std::int64_t>(46.8 * kGib);
  const LayoutPlan tp = PlanOne(kimi, 8, 1, options);
  EXPECT_EQ(tp.kv_bytes_per_token_per_rank, 70272);
  EXPECT_EQ(tp.kv_copies, 8);
  EXPECT_NEAR(static_cast<double>(tp.kv_tokens), 715072, 0.01 * 715072);
  const LayoutPlan dcp = PlanOne(kimi, 8, 8, options);
  EXPECT_EQ(dcp.kv_bytes_per_token_per_rank, 70272.0 / 8);
  EXPECT_EQ(dcp.kv_copies, 1);
  EXPECT_NEAR(static_cast<double>(dcp.kv_tokens), 5721088, 0.01 * 5721088);

  options.kv_bytes = 1;
  options.kv_memory_bytes = static_cast<std::int64_t>(94.7 * kGib);
  EXPECT_EQ(PlanOne(kimi, 8, 1, options).max_sequences, 44);
  EXPECT_EQ(PlanOne(kimi, 8, 8, options).max_sequences, 353);
}

TEST(PlanTest, GqaCopiesEndWhereHeadsDo) {
  WEFT_PUBLISHED_OR_SKIP(qwen, "qwen3-235b-a22b.json");  // 4 KV heads of 128, 94 layers
  const PlanOptions options{.kv_bytes = 2, .kv_memory_bytes = 1 << 30, .contexts = {32768}};
  constexpr double kHead = 94.0 * 2 * 128 * 2;
  EXPECT_EQ(PlanOne(qwen, 2, 1, options).kv_bytes_per_token_per_rank, 2 * kHead);
  EXPECT_EQ(PlanOne(qwen, 16, 1, options).kv_bytes_per_token_per_rank, kHead);
  EXPECT_EQ(PlanOne(qwen, 16, 1, options).kv_copies, 4);
  EXPECT_EQ(PlanOne(qwen, 16, 4, options).kv_bytes_per_token_per_rank, kHead / 4);
  EXPECT_EQ(PlanOne(qwen, 16, 4, options).kv_copies, 1);
  EXPECT_EQ(PlanOne(qwen, 16, 4, options).note, "");
  // Twice the heads on half the positions.
  EXPECT_EQ(PlanOne(qwen, 16, 8, options).kv_bytes_per_token_per_rank, kHead / 4);
  EXPECT_THAT(PlanOne(qwen, 16, 8, options).note, HasSubstr("no copies left"));
}

// T, N and heads as the guides of other implementations allow them: MLA T >= N and T % N == 0, GQA
// (T / Hkv) >= N and (T / Hkv) % N == 0; there, too, T is a multiple of Hkv, and N divides it.
TEST(PlanTest, EveryLayoutThatOthersAllowIsAccepted) {
  ModelConfig config{.num_layers = 1,
                     .hidden_size = 8,
                     .intermediate_size = 64,
                     .head_dim = 8,
                     .value_dim = 8,
                     .vocab_size = 64,
                     .max_position_embeddings = 1024};
  const PlanOptions options{.kv_memory_bytes = 1 << 20, .contexts = {1}};
  int layouts = 0;
  const auto expect_accepted = [&](std::int32_t tp, std::int32_t dcp) {
    SCOPED_TRACE(
        fmt::format("T={} N={} heads {}/{}", tp, dcp, config.num_q_heads, config.num_kv_heads));
    EXPECT_GT(PlanOne(config, tp, dcp, options).kv_tokens, 0);
    ++layouts;
  };
  for (std::int32_t kv_heads = 1; kv_heads <= 16; ++kv_heads) {
    for (std::int32_t q_per_kv : {1, 2, 3, 4, 7, 8, 16}) {
      config.num_kv_heads = kv_heads;
      config.num_q_heads = kv_heads * q_per_kv;
      const std::int32_t most = std::min(32, config.num_q_heads);
      for (std::int32_t tp = kv_heads; tp <= most; tp += kv_heads) {
        for (std::int32_t dcp = 1; dcp <= tp / kv_heads; ++dcp) {
          if (tp / kv_heads % dcp == 0) expect_accepted(tp, dcp);
        }
      }
    }
  }
  config.mla =
      MlaConfig{.kv_lora_rank = 6, .qk_nope_head_dim = 4, .qk_rope_head_dim = 2, .v_head_dim = 4};
  config.num_kv_heads = 1;
  config.value_dim = 6;
  for (std::int32_t heads : {16, 64}) {
    config.num_q_heads = heads;
    for (std::int32_t tp = 1; tp <= heads; ++tp) {
      for (std::int32_t dcp = 1; dcp <= tp; ++dcp) {
        if (tp % dcp == 0) expect_accepted(tp, dcp);
      }
    }
  }
  EXPECT_GT(layouts, 1000);
}

TEST(PlanTest, TheOnlyLayoutAskedForIsRefusedWithAReason) {
  ModelConfig config{.num_layers = 1,
                     .hidden_size = 8,
                     .intermediate_size = 8,
                     .num_q_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 8,
                     .value_dim = 8,
                     .vocab_size = 8};
  PlanOptions options{.tensor_parallel_size = 4, .decode_context_parallel_size = 3};
  options.contexts = {16};
  EXPECT_THAT(std::string(PlanLayouts(config, options).status().message()),
              HasSubstr("it must divide --tensor-parallel-size 4: one of 1, 2, 4"));
  // Of all layouts, those that can be are planned: T up to the 4 heads.
  options = {.kv_memory_bytes = 1 << 20, .contexts = {16}};
  const auto plans = PlanLayouts(config, options);
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ(plans->size(), 6U);
}

// Weights that a rank loads, in elements.
std::int64_t Loaded(const DecoderWeights& weights) {
  const auto of = [](const kernels::PackedMatrix& m) {
    return std::int64_t{m.out_features()} * m.in_features();
  };
  std::int64_t count = of(weights.embedding) + of(weights.lm_head) +
                       static_cast<std::int64_t>(weights.final_norm.size());
  for (const DecoderLayerWeights& w : weights.layers) {
    for (const auto* m : {&w.mla.q_a, &w.mla.q_b, &w.mla.kv_a, &w.q, &w.kv, &w.o, &w.gate_up,
                          &w.down, &w.moe.router}) {
      count += of(*m);
    }
    for (const auto* list :
         {&w.mla.k_up, &w.mla.k_from_latent, &w.mla.v_up, &w.moe.gate_up, &w.moe.down}) {
      for (const auto& m : *list) count += of(m);
    }
    for (const auto* v :
         {&w.input_norm, &w.mla.q_a_bias, &w.mla.q_a_norm, &w.mla.kv_a_bias, &w.mla.kv_a_norm,
          &w.q_bias, &w.kv_bias, &w.o_bias, &w.q_norm, &w.k_norm, &w.post_attention_norm,
          &w.gate_up_bias, &w.down_bias, &w.moe.score_bias}) {
      count += static_cast<std::int64_t>(v->size());
    }
  }
  return count;
}

TEST(PlanTest, WeightsAreThoseThatARankLoads) {
  kernels::CpuStream stream(1);
  for (const std::string& name : PresentFamilyCheckpoints()) {
    const std::filesystem::path dir = *GoldenPath(name);
    const ModelConfig config = *LoadModelConfig(dir);
    const auto checkpoint = Checkpoint::Open(dir);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const auto& [tp, dcp, whole, replicated] :
         {std::tuple{1, 1, false, false}, {3, 1, false, false}, {4, 2, true, true}}) {
      const bool experts = whole && config.moe.has_value();
      for (std::int32_t rank = 0; rank < tp; ++rank) {
        SCOPED_TRACE(fmt::format("{} T={} N={} rank {}", name, tp, dcp, rank));
        const ShardLayout layout = *ShardLayout::Create(
            {.tensor_parallel_size = tp,
             .decode_context_parallel_size = dcp,
             .replicate_query = replicated},
            {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, rank);
        const auto weights =
            LoadDecoderWeights(config, **checkpoint, layout, DType::kFloat32,
                               WeightFormat::kFloat32, experts, stream, [](int) {});
        ASSERT_TRUE(weights.ok()) << weights.status();
        EXPECT_EQ(CountWeights(config, layout, experts).total(), Loaded(*weights));
      }
    }
  }
}

TEST(PlanTest, MemoryOfADeviceIsForWeightsFirst) {
  WEFT_PUBLISHED_OR_SKIP(llama, "llama-3.1-8b.json");  // 8.03e9 weights
  PlanOptions options{.memory_bytes = 80 * (std::int64_t{1} << 30), .contexts = {131072}};
  const LayoutPlan alone = PlanOne(llama, 1, 1, options);
  EXPECT_NEAR(static_cast<double>(alone.weight_bytes_per_rank), 2 * 8.03e9, 0.01 * 2 * 8.03e9);
  EXPECT_EQ(alone.kv_memory_bytes, *options.memory_bytes - alone.weight_bytes_per_rank);
  // 2 * 8 heads * 128 * 32 layers * 2 bytes = 128 KiB a token: 16 GiB a sequence.
  EXPECT_EQ(alone.max_sequences, 4);
  options.memory_bytes = std::int64_t{10} << 30;
  EXPECT_THAT(PlanOne(llama, 1, 1, options).note, HasSubstr("15.0 GiB of weights"));
  EXPECT_EQ(PlanOne(llama, 1, 1, options).kv_tokens, 0);
}

TEST(PlanTest, SharingPositionsLosesAtShortContextsAndIsRecommendedAtLongOnes) {
  WEFT_PUBLISHED_OR_SKIP(kimi, "kimi-k2.json");
  PlanOptions options{.tensor_parallel_size = 8,
                      .weight_bytes = *StorageBytes("nvfp4"),
                      .kv_bytes = 1,
                      .wire_bytes = 2,
                      .contexts = {1024, 65536}};
  options.gpu = FindGpu("b200");
  options.memory_bytes = static_cast<std::int64_t>(options.gpu->memory_bytes * 0.9);
  auto plans = PlanLayouts(kimi, options);
  ASSERT_TRUE(plans.ok()) << plans.status();
  ASSERT_EQ(plans->size(), 8U);  // N of 1, 2, 4, 8 for each context
  for (const LayoutPlan& plan : *plans) {
    if (plan.decode_context_parallel_size == 1) {
      EXPECT_FALSE(plan.short_slowdown.has_value());
      continue;
    }
    EXPECT_GT(*plan.short_slowdown, 1.0);
    ASSERT_TRUE(plan.break_even_context.has_value());
    EXPECT_GT(*plan.break_even_context, 1024);
  }
  EXPECT_THAT(Recommend(absl::MakeSpan(*plans)), HasSubstr("T=8 N=8"));
  EXPECT_TRUE(plans->back().recommended);
  EXPECT_THAT(PlanJson(*plans), HasSubstr("\"max_sequences\": "));
}

TEST(PlanTest, WireBytesAreTheFormulas) {
  const ModelConfig config{.num_layers = 1,
                           .hidden_size = 16,
                           .num_q_heads = 9,
                           .num_kv_heads = 1,
                           .head_dim = 24,
                           .value_dim = 24};
  const auto layout = [&](bool replicate) {
    return *ShardLayout::Create({.tensor_parallel_size = 4,
                                 .decode_context_parallel_size = 2,
                                 .replicate_query = replicate},
                                {.num_q_heads = 9, .num_kv_heads = 1}, 0);
  };
  StepLoad load{.batch = 5, .wire_bytes = 2};
  // F = 1/2, Hg = 2 * ceil(9 / 4) = 6: F * R * Hg = 15.
  EXPECT_EQ(DcpWireBytes(config, layout(false), load), 15 * 24 * 2 + 15 * 24 * 2 + 5 * 6 * 4);
  EXPECT_EQ(DcpWireBytes(config, layout(true), load), 15 * 24 * 2 + 5 * 6 * 4);
  load.a2a_exchange = true;
  EXPECT_EQ(DcpWireBytes(config, layout(false), load), 15 * 24 * 2 + 15 * (24 * 2 + 4));
  EXPECT_EQ(TpWireBytes(config, layout(false), load), 2 * 2 * 0.75 * 5 * 16 * 2);
}

}  // namespace
}  // namespace weft
