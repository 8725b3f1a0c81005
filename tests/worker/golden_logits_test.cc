// Law 2 on logits: fp32 equals the reference over layouts; lower precision differs from it by at
// most twice what the precision costs by itself, and never by over 2 % of the logits' range.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "server/base/status_macros.h"
#include "tests/golden.h"
#include "tests/worker/family_checkpoints.h"
#include "tests/worker/plan_runner.h"
#include "tests/worker/reference_model.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

constexpr std::int64_t kMaxLen = 192;

struct Layout {
  int tp, dcp, block_size, interleave;
  DcpExchange exchange;
  bool expert_parallel = false;  // where the model has experts

  std::string Name() const {
    return fmt::format("T={} N={} V={} I={} {}{}", tp, dcp, block_size, interleave,
                       DcpExchangeName(exchange), expert_parallel ? ", whole experts" : "");
  }
};

constexpr Layout kOneRank = {1, 1, 16, 1, DcpExchange::kAgRs};
constexpr Layout kTwoShards = {2, 2, 16, 2, DcpExchange::kA2a};
constexpr Layout kLayouts[] = {kOneRank,
                               kTwoShards,
                               {2, 1, 48, 1, DcpExchange::kAgRs},
                               {3, 3, 48, 16, DcpExchange::kAgRs, true},
                               {4, 2, 8, 4, DcpExchange::kAgRs, true},
                               {4, 4, 128, 4, DcpExchange::kA2a}};

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, const Layout& layout) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = layout.tp,
                          .decode_context_parallel_size = layout.dcp,
                          .block_size = layout.block_size,
                          .interleave = layout.interleave};
  options.model.exchange = layout.exchange;
  options.model.expert_parallel = layout.expert_parallel && LoadModelConfig(dir)->moe.has_value();
  options.model.max_model_len = kMaxLen;
  options.model.num_blocks = 2 * (kMaxLen / layout.block_size + 1);
  options.rank.stall_timeout = absl::Seconds(20);
  options.rank.gather_all_logits = true;
  return options;
}

double Range(absl::Span<const float> values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return *high - *low;
}

absl::Span<const float> Row(const GoldenTensor& tensor, std::size_t row) {
  const std::size_t size = tensor.shape.back();
  return absl::MakeConstSpan(tensor.values).subspan(row * size, size);
}

template <typename T>
double MaxDifference(const std::vector<T>& a, absl::Span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double{a[i]} - b[i]);
    if (!(difference <= most)) most = difference;  // NaN counts
  }
  return most;
}

void ExpectEqualRow(const std::vector<float>& got, absl::Span<const float> want) {
  EXPECT_LE(MaxDifference(got, want), 1e-4 * Range(want));
}

// The prompt and the reference's tokens but the last: the logits of its last 48 positions chose
// the reference's tokens.
std::vector<std::int32_t> TeacherForced(const GoldenPrompt& prompt) {
  std::vector<std::int32_t> ids = prompt.ids;
  ids.insert(ids.end(), prompt.greedy.begin(), prompt.greedy.end() - 1);
  return ids;
}

double LogProb(const std::vector<float>& logits, std::int32_t id) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - max);
  return logits[id] - max - std::log(sum);
}

class GoldenLogitsTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenLogitsTest, ::testing::ValuesIn(kFamilyCheckpoints),
                         [](const auto& test_case) { return std::string(test_case.param); });

TEST_P(GoldenLogitsTest, PromptsGiveTheReferencesLastLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  for (const Layout& layout : kLayouts) {
    OnLeader(OptionsOf(dir, layout), [&](PlanRunner& runner) {
      for (const char* name : {"len130", "len1", "len33", "len7"}) {
        for (std::size_t chunk : {256, 13}) {
          SCOPED_TRACE(fmt::format("{} {} in chunks of {}", layout.Name(), name, chunk));
          Logits logits;
          RETURN_IF_ERROR(runner.Prompt(golden.Prompt(name).ids, chunk, logits));
          ExpectEqualRow(logits.at(0), Row(golden.Tensor(fmt::format("last_logits.{}", name)), 0));
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(GoldenLogitsTest, TeacherForcedStepsGiveTheReferencesLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const GoldenPrompt& prompt = golden.Prompt("len7");
  const GoldenTensor& want = golden.Tensor("step_logits.len7");
  const std::vector<std::int32_t> ids = TeacherForced(prompt);
  for (const Layout& layout : kLayouts) {
    OnLeader(OptionsOf(dir, layout), [&](PlanRunner& runner) {
      // One token a step, and several rows of the sequence a step, all of them sampled.
      for (std::size_t rows : {1, 5}) {
        Logits logits;
        RETURN_IF_ERROR(runner.Prompt(prompt.ids, 256, logits));
        for (std::size_t at = prompt.ids.size(); at < ids.size(); at += rows) {
          const auto part = absl::MakeConstSpan(ids).subspan(at, rows);
          RETURN_IF_ERROR(runner.Run(part, static_cast<std::int64_t>(at),
                                     static_cast<int>(part.size()), logits));
        }
        EXPECT_EQ(logits.size(), 48U);
        for (std::size_t i = 0; i < logits.size(); ++i) {
          SCOPED_TRACE(fmt::format("{} step {}, {} rows a step", layout.Name(), i, rows));
          ExpectEqualRow(logits[i], Row(want, i));
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(GoldenLogitsTest, APromptsTokensHaveTheReferencesLogProbabilities) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const std::vector<std::int32_t>& ids = golden.Prompt("len33").ids;
  const GoldenTensor& want = golden.Tensor("prompt_logprobs.len33");
  for (const Layout& layout : kLayouts) {
    OnLeader(OptionsOf(dir, layout), [&](PlanRunner& runner) {
      Logits logits;
      RETURN_IF_ERROR(runner.Run(ids, 0, static_cast<int>(ids.size()), logits));
      for (std::size_t i = 1; i < ids.size(); ++i) {
        EXPECT_NEAR(LogProb(logits[i - 1], ids[i]), want.values[i - 1], 1e-3)
            << layout.Name() << " token " << i;
      }
      return absl::OkStatus();
    });
  }
}

// Logits of prompt and teacher-forced tokens, the last 48 rows, in one chunk.
Logits TeacherForcedLogits(const std::filesystem::path& dir, const Layout& layout, DType weights,
                           DType kv, absl::Span<const std::int32_t> ids,
                           std::optional<WeightFormat> quantization = std::nullopt) {
  LocalGroupOptions options = OptionsOf(dir, layout);
  options.model.dtype = weights;
  options.model.kv_cache_dtype = kv;
  options.model.quantization = quantization;
  Logits logits;
  OnLeader(options, [&](PlanRunner& runner) { return runner.Run(ids, 0, 48, logits); });
  return logits;
}

TEST_P(GoldenLogitsTest, LowerPrecisionCostsWhatThePrecisionCosts) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const std::vector<std::int32_t> ids = TeacherForced(golden.Prompt("len7"));
  const GoldenTensor& want = golden.Tensor("step_logits.len7");
  const ModelConfig config = *LoadModelConfig(dir);
  struct Precision {
    DType weights, kv;
  };
  for (const auto& [weights, kv] : {Precision{DType::kFloat32, DType::kFloat32},
                                    {DType::kBFloat16, DType::kBFloat16},
                                    {DType::kBFloat16, DType::kFloat16},
                                    {DType::kFloat16, DType::kFloat16},
                                    {DType::kFloat32, DType::kFloat16}}) {
    SCOPED_TRACE(fmt::format("weights {}, KV {}", DTypeName(weights), DTypeName(kv)));
    const auto reference = ReferenceModel(dir, FormatOf(weights), kv).Logits(ids);
    const Logits alone = TeacherForcedLogits(dir, kOneRank, weights, kv, ids);
    const Logits sharded = TeacherForcedLogits(dir, kTwoShards, weights, kv, ids);
    ASSERT_EQ(alone.size(), 48U);
    ASSERT_EQ(sharded.size(), 48U);
    double allowed = 0;  // what the reference loses in this precision
    double range = 0;
    double lost = 0;
    double off = 0;  // from the reference
    double apart = 0;
    for (std::size_t i = 0; i < 48; ++i) {
      const auto row = Row(want, i);
      range = std::max(range, Range(row));
      allowed = std::max(allowed, MaxDifference(reference[i + ids.size() - 48], row));
      lost = std::max({lost, MaxDifference(alone[i], row), MaxDifference(sharded[i], row)});
      off = std::max(off, MaxDifference(reference[i + ids.size() - 48], alone[i]));
      apart = std::max(apart, MaxDifference(alone[i], sharded[i]));
    }
    std::printf(
        "%s weights %s KV %s: %.2e of the range, reference %.2e, off it %.2e, layouts apart %.2e\n",
        GetParam(), std::string(DTypeName(weights)).c_str(), std::string(DTypeName(kv)).c_str(),
        lost / range, allowed / range, off / range, apart / range);
    if (weights == DType::kFloat32 && kv == DType::kFloat32) {
      // The reference of this test is itself right.
      EXPECT_LE(allowed, 1e-4 * range);
      continue;
    }
    EXPECT_LE(lost, 2 * allowed);
    EXPECT_LE(apart, 2 * allowed);
    // What is rounded is rounded alike; experts make of a last bit what they will.
    if (!config.moe.has_value()) {
      EXPECT_LE(off, 0.45 * allowed);
    }
    // Where rounded weights send a token to other experts, the reference itself is further off.
    EXPECT_LE(lost, 0.02 * range + (allowed > 0.02 * range ? allowed : 0));
  }
}

// Integers are exact in all that follows their rounding: the answer is that of plain loops over the
// same integers, whatever the layout.
TEST_P(GoldenLogitsTest, QuantizedWeightsAnswerAsTheirValuesDo) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const ModelConfig config = *LoadModelConfig(dir);
  const std::vector<std::int32_t> ids = TeacherForced(golden.Prompt("len7"));
  const GoldenTensor& want = golden.Tensor("step_logits.len7");
  for (const auto& [format, dtype] : {std::pair(WeightFormat::kInt8, DType::kFloat32),
                                      {WeightFormat::kInt4, DType::kFloat32},
                                      {WeightFormat::kInt8, DType::kBFloat16}}) {
    // With bfloat16 these have matrices of that, too.
    if (dtype != DType::kFloat32 && (config.moe.has_value() || config.mla.has_value())) continue;
    const auto reference = ReferenceModel(dir, format, DType::kFloat32, dtype).Logits(ids);
    double costs = 0;
    for (const Layout& layout : kLayouts) {
      SCOPED_TRACE(fmt::format("{} {}", FormatName(format), layout.Name()));
      const LayoutOptions options = OptionsOf(dir, layout).model.layout;
      const auto shards = ShardLayout::Create(
          options, {.num_q_heads = config.num_q_heads, .num_kv_heads = config.num_kv_heads}, 0);
      ASSERT_TRUE(shards.ok()) << shards.status();
      if (!CheckQuantGroups(config, *shards, false).ok()) {
        EXPECT_GT(layout.tp, 1);
        continue;
      }
      const Logits logits = TeacherForcedLogits(dir, layout, dtype, DType::kFloat32, ids, format);
      ASSERT_EQ(logits.size(), 48U);
      for (std::size_t i = 0; i < 48; ++i) {
        const std::vector<double>& exact = reference[i + ids.size() - 48];
        const double range = Range(Row(want, i));
        // Where a value lies between two integers, or bfloat16s, they may be rounded differently.
        const double apart = dtype == DType::kFloat32 ? 1e-3 : 3e-3;
        EXPECT_LE(MaxDifference(exact, logits[i]), apart * range) << "row " << i;
        costs = std::max(costs, MaxDifference(exact, Row(want, i)) / range);
      }
    }
    std::printf("%s as %s: %.2e of the range\n", GetParam(),
                std::string(FormatName(format)).c_str(), costs);
    EXPECT_GT(costs, 2e-3);  // or this test could not see the difference
  }
}

}  // namespace
}  // namespace weft
