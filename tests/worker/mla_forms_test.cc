// MLA's forms of a prompt's attention give the same answer, move the bytes that the formulas say,
// and are chosen by what they cost.

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "server/base/status_macros.h"
#include "tests/golden.h"
#include "tests/temp_dir.h"
#include "tests/worker/plan_runner.h"

namespace weft {
namespace {

constexpr const char* kCheckpoints[] = {"deepseek_v2_lite", "deepseek_v2_group", "deepseek_v3",
                                        "deepseek_v3_noqlora"};
constexpr MlaForm kForms[] = {MlaForm::kAbsorbed, MlaForm::kChunk, MlaForm::kWhole};
const char* const kFormNames[] = {"absorbed", "chunk decompressed", "all decompressed"};

struct Layout {
  int tp, dcp, block_size, interleave;
  DcpExchange exchange;
  bool replicate_query;

  std::string Name() const {
    return fmt::format("T={} N={} V={} I={} {}{}", tp, dcp, block_size, interleave,
                       DcpExchangeName(exchange), replicate_query ? ", queries replicated" : "");
  }
};

constexpr Layout kLayouts[] = {
    {1, 1, 16, 1, DcpExchange::kAgRs, false},  {2, 2, 16, 8, DcpExchange::kA2a, false},
    {2, 2, 128, 64, DcpExchange::kAgRs, true}, {3, 3, 48, 1, DcpExchange::kAgRs, false},
    {4, 2, 8, 2, DcpExchange::kA2a, true},     {4, 4, 16, 4, DcpExchange::kAgRs, false}};

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, const Layout& layout, MlaForm form,
                            int max_len, int max_rows) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = layout.tp,
                          .decode_context_parallel_size = layout.dcp,
                          .block_size = layout.block_size,
                          .interleave = layout.interleave,
                          .replicate_query = layout.replicate_query};
  options.model.exchange = layout.exchange;
  options.model.max_model_len = max_len;
  options.model.max_num_batched_tokens = max_rows;
  options.model.num_blocks = 2 * (max_len / layout.block_size + 1);
  options.rank.stall_timeout = absl::Seconds(20);
  options.rank.gather_all_logits = true;
  options.rank.mla_form = form;
  return options;
}

void ExpectNear(const std::vector<float>& got, absl::Span<const float> want) {
  ASSERT_EQ(got.size(), want.size());
  const auto [low, high] = std::minmax_element(want.begin(), want.end());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 1e-4 * (*high - *low)) << "logit " << i;
  }
}

class MlaFormsTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, MlaFormsTest, ::testing::ValuesIn(kCheckpoints),
                         [](const auto& test_case) { return std::string(test_case.param); });

TEST_P(MlaFormsTest, EveryFormGivesTheReferencesLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  for (const Layout& layout : kLayouts) {
    for (MlaForm form : kForms) {
      OnLeader(OptionsOf(dir, layout, form, 192, 256), [&](PlanRunner& runner) {
        for (const char* name : {"len1", "len33", "len130"}) {
          for (std::size_t chunk : {256, 13}) {
            SCOPED_TRACE(fmt::format("{}, {}, {} in chunks of {}", layout.Name(),
                                     kFormNames[static_cast<int>(form)], name, chunk));
            Logits logits;
            RETURN_IF_ERROR(runner.Prompt(golden.Prompt(name).ids, chunk, logits));
            const GoldenTensor& want = golden.Tensor(fmt::format("last_logits.{}", name));
            ExpectNear(logits.at(0), want.values);
          }
        }
        return absl::OkStatus();
      });
    }
  }
}

// The checkpoint at `from` with positions for more tokens, in `to`.
void Lengthen(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::stringstream config;
  config << std::ifstream(from / "config.json").rdbuf();
  std::string text = config.str();
  const std::string key = "\"max_position_embeddings\": 512";
  ASSERT_NE(text.find(key), std::string::npos);
  text.replace(text.find(key), key.size(), "\"max_position_embeddings\": 4096");
  std::ofstream(to / "config.json") << text;
  std::filesystem::create_symlink(std::filesystem::absolute(from / "model.safetensors"),
                                  to / "model.safetensors");
}

// Several tiles of keys inside a chunk and before it.
TEST_P(MlaFormsTest, EveryFormGivesTheSameOverTiles) {
  WEFT_GOLDEN_OR_SKIP(golden, GetParam());
  const TempDir temp;
  const std::filesystem::path dir = temp.path();
  Lengthen(golden, dir);
  std::vector<std::int32_t> ids;
  const int vocab = LoadModelConfig(dir)->vocab_size;
  for (int i = 0; i < 1600; ++i) ids.push_back((i * 131 + i / 7) % vocab);
  constexpr int kRows = 1100;
  for (const Layout& layout : {Layout{1, 1, 16, 1, DcpExchange::kAgRs, false},
                               Layout{2, 2, 256, 128, DcpExchange::kAgRs, false},
                               Layout{4, 4, 32, 1, DcpExchange::kA2a, false}}) {
    Logits logits;
    for (MlaForm form : kForms) {
      OnLeader(OptionsOf(dir, layout, form, 2048, kRows),
               [&](PlanRunner& runner) { return runner.Prompt(ids, kRows, logits); });
    }
    SCOPED_TRACE(layout.Name());
    ASSERT_EQ(logits.size(), 3U);
    ExpectNear(logits[1], logits[0]);
    ExpectNear(logits[2], logits[0]);
  }
}

// Bytes that rank 0 receives in collectives of one step of `rows` rows after `context` tokens.
std::int64_t Received(const std::filesystem::path& dir, const Layout& layout, MlaForm form,
                      int context, int rows) {
  std::int64_t received = 0;
  LocalGroupOptions options = OptionsOf(dir, layout, form, 192, 256);
  options.drive = [&](Rank& rank) {
    PlanRunner runner(rank, options);
    const std::vector<std::int32_t> ids(192, 5);
    Logits logits;
    if (context > 0) {
      RETURN_IF_ERROR(runner.Run(absl::MakeConstSpan(ids).first(context), 0, 0, logits));
    }
    const std::uint64_t before = rank.counters().collective_received_bytes;
    RETURN_IF_ERROR(runner.Run(absl::MakeConstSpan(ids).first(rows), context, 0, logits));
    received = static_cast<std::int64_t>(rank.counters().collective_received_bytes - before);
    return absl::OkStatus();
  };
  EXPECT_TRUE(LocalGroup::Start(options).status().ok());
  return received;
}

// F = (N - 1) / N and Hg = N * ceil(Hq / T) padded heads: queries F * R * Hg * Dq, none where they
// are replicated; outputs F * R * Hg * Do; LSEs F * R * Hg with a2a, (N - 1) * R * Hg with ag_rs;
// latents F * L * Dq; 4 bytes each.
TEST_P(MlaFormsTest, EveryFormMovesTheBytesOfItsFormula) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const ModelConfig config = *LoadModelConfig(dir);
  const std::int64_t dq = config.head_dim;
  const std::int64_t d_out = std::min(config.mla->v_head_dim, config.value_dim);
  constexpr int kContext = 96;  // whole turns of every interleave here
  constexpr int kRows = 48;
  for (const Layout& layout : kLayouts) {
    if (layout.interleave > 8) continue;  // the rows would not be shared evenly
    const std::int64_t n = layout.dcp;
    const std::int64_t padded = (config.num_q_heads + layout.tp - 1) / layout.tp;
    const std::int64_t others = (n - 1) * kRows * padded;  // F * R * Hg
    const std::int64_t lse = layout.exchange == DcpExchange::kA2a ? others : others * n;
    const std::int64_t absorbed = (layout.replicate_query ? 0 : others * dq) + others * d_out + lse;
    const auto latents = [&](std::int64_t keys) { return (n - 1) * keys / n * dq; };
    const std::int64_t want[] = {absorbed, absorbed + latents(kRows), latents(kContext + kRows)};
    std::int64_t got[3];
    for (int form = 0; form < 3; ++form) {
      got[form] = Received(dir, layout, kForms[form], kContext, kRows);
    }
    // What else is received is the same for all.
    for (int form = 1; form < 3; ++form) {
      EXPECT_EQ(got[form] - got[0], (n == 1 ? 0 : 4 * config.num_layers * (want[form] - want[0])))
          << layout.Name() << ", " << kFormNames[form];
    }
    if (n == 1) continue;
    const ShardLayout shards = *ShardLayout::Create(
        OptionsOf(dir, layout, kForms[0], 192, 256).model.layout,
        {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, 0);
    for (int form = 0; form < 3; ++form) {
      EXPECT_DOUBLE_EQ(CostOf(kForms[form], config, shards, kRows, kContext, layout.exchange).bytes,
                       4.0 * static_cast<double>(want[form]));
    }
  }
}

// 2,176 operations a head and key absorbed, 640 decompressed, and 262,144 to decompress a key of
// published DeepSeek models.
TEST(MlaCostTest, IsTheArithmeticOfPublishedModels) {
  ModelConfig config{.num_q_heads = 128, .num_kv_heads = 1, .head_dim = 576, .value_dim = 512};
  config.mla = MlaConfig{.q_lora_rank = 1536,
                         .kv_lora_rank = 512,
                         .qk_nope_head_dim = 128,
                         .qk_rope_head_dim = 64,
                         .v_head_dim = 128};
  const ShardLayout alone = *ShardLayout::Create({}, {.num_q_heads = 128, .num_kv_heads = 1}, 0);
  const auto cost = [&](MlaForm form, double rows, double context) {
    return CostOf(form, config, alone, static_cast<std::int64_t>(rows),
                  static_cast<std::int64_t>(context), DcpExchange::kAgRs)
        .operations;
  };
  constexpr double kBetween = 262144;
  for (double rows : {1.0, 100.0, 171.0, 4096.0}) {
    for (double context : {0.0, 1000.0, 100000.0}) {
      const double inside = rows * (rows + 1) / 2;
      EXPECT_EQ(cost(MlaForm::kAbsorbed, rows, context),
                128 * (rows * kBetween + (rows * context + inside) * 2176));
      EXPECT_EQ(cost(MlaForm::kChunk, rows, context),
                128 * (2 * rows * kBetween + rows * context * 2176 + inside * 640));
      EXPECT_EQ(cost(MlaForm::kWhole, rows, context),
                128 * ((rows + context) * kBetween + (rows * context + inside) * 640));
    }
  }
  // A context is worth decompressing for 171 rows and more.
  EXPECT_LT(cost(MlaForm::kAbsorbed, 160, 1e6), cost(MlaForm::kWhole, 160, 1e6));
  EXPECT_GT(cost(MlaForm::kAbsorbed, 180, 1e6), cost(MlaForm::kWhole, 180, 1e6));
}

}  // namespace
}  // namespace weft
