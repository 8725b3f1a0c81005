// Law 2 for the CUDA backend, under emulation: in fp32 its tokens are the reference's, over
// layouts; in lower precision its logits lose at most twice what the precision costs.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "tests/golden.h"
#include "tests/worker/family_checkpoints.h"
#include "tests/worker/plan_runner.h"
#include "tests/worker/reference_model.h"

namespace weft {
namespace {

constexpr std::int64_t kMaxLen = 192;

struct Layout {
  int tp, dcp, block_size, interleave;
  DcpExchange exchange;

  std::string Name() const {
    return fmt::format("T={} N={} V={} I={} {}", tp, dcp, block_size, interleave,
                       DcpExchangeName(exchange));
  }
};

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, const Layout& layout) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.device = Device::kCudaEmu;
  options.model.layout = {.tensor_parallel_size = layout.tp,
                          .decode_context_parallel_size = layout.dcp,
                          .block_size = layout.block_size,
                          .interleave = layout.interleave};
  options.model.exchange = layout.exchange;
  options.model.dtype = DType::kFloat32;
  options.model.max_model_len = kMaxLen;
  options.model.num_blocks = 4 * (kMaxLen / layout.block_size + 1);
  options.rank.stall_timeout = absl::Seconds(60);
  options.open_device =
      [](int rank,
         kernels::CpuStream& host) -> absl::StatusOr<std::unique_ptr<kernels::DeviceStream>> {
    return kernels::cuda::CudaDevice::Open(rank, host);
  };
  return options;
}

class CudaEmuGroupTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, CudaEmuGroupTest, ::testing::ValuesIn(kFamilyCheckpoints),
                         [](const auto& test_case) { return std::string(test_case.param); });

// Prompts of several lengths at once, so that steps have prompts' rows beside decoded ones.
TEST_P(CudaEmuGroupTest, GreedyTokensAreTheReferences) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const bool experts = LoadModelConfig(dir)->moe.has_value();
  for (const Layout& layout :
       {Layout{1, 1, 16, 1, DcpExchange::kAgRs}, Layout{2, 2, 16, 2, DcpExchange::kAgRs},
        Layout{2, 2, 48, 4, DcpExchange::kA2a}}) {
    SCOPED_TRACE(layout.Name());
    LocalGroupOptions options = OptionsOf(dir, layout);
    options.model.max_num_seqs = 4;
    options.model.graphs = options.rank.graphs = layout.tp == 1 && !experts;
    auto group = LocalGroup::Start(options);
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<EngineRequest> requests;
    const std::vector<std::string> names = {"len1", "len7", "len33"};
    constexpr int kTokens = 12;
    for (const std::string& name : names) {
      EngineRequest request;
      request.prompt_token_ids = golden.Prompt(name).ids;
      request.max_tokens = kTokens;
      request.ignore_eos = true;
      request.sampling.temperature = 0;
      requests.push_back(std::move(request));
    }
    const std::vector<Completion> done = (*group)->Generate(std::move(requests));
    for (std::size_t i = 0; i < names.size(); ++i) {
      ASSERT_TRUE(done[i].status.ok()) << done[i].status << (*group)->status();
      const std::vector<std::int32_t>& greedy = golden.Prompt(names[i]).greedy;
      EXPECT_EQ(done[i].token_ids,
                std::vector<std::int32_t>(greedy.begin(), greedy.begin() + kTokens))
          << names[i];
    }
  }
}

// Tables, lengths and seeds change from step to step, and so does the number of sequences: what a
// graph has kept of the step that it was recorded in would show.
TEST_P(CudaEmuGroupTest, AReplayGivesTheBitsOfLaunchesOneByOne) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  LocalGroupOptions options = OptionsOf(dir, {1, 1, 16, 1, DcpExchange::kAgRs});
  options.model.max_num_seqs = 5;
  options.model.max_num_batched_tokens = 40;
  const Golden golden = LoadGolden(dir);
  const bool experts = LoadModelConfig(dir)->moe.has_value();
  std::vector<Completion> done[2];
  for (const bool graphs : {false, true}) {
    options.model.graphs = options.rank.graphs = graphs;
    auto group = LocalGroup::Start(options);
    if (graphs && experts) {
      EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
      return;
    }
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 7; ++i) {
      EngineRequest request;
      request.prompt_token_ids = golden.Prompt(i % 2 == 0 ? "len7" : "len33").ids;
      request.max_tokens = 3 + 2 * i;
      request.ignore_eos = true;
      request.sampling.temperature = i % 3 == 0 ? 0.0F : 0.9F;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      auto logits = std::make_shared<LogitsParams>();
      logits->logprobs = 2;
      request.logits = std::move(logits);
      requests.push_back(std::move(request));
    }
    done[graphs] = (*group)->Generate(std::move(requests));
  }
  for (std::size_t i = 0; i < done[0].size(); ++i) {
    ASSERT_TRUE(done[1][i].status.ok()) << done[1][i].status;
    EXPECT_EQ(done[1][i].token_ids, done[0][i].token_ids) << i;
    ASSERT_EQ(done[1][i].logprobs.size(), done[0][i].logprobs.size());
    for (std::size_t j = 0; j < done[0][i].logprobs.size(); ++j) {
      EXPECT_EQ(done[1][i].logprobs[j].token.logprob, done[0][i].logprobs[j].token.logprob)
          << i << " " << j;
    }
  }
}

double MaxDifference(absl::Span<const float> got, absl::Span<const float> want) {
  double most = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(double{got[i]} - want[i]);
    if (!(difference <= most)) most = difference;  // NaN counts
  }
  return most;
}

TEST_P(CudaEmuGroupTest, LowerPrecisionCostsWhatThePrecisionCosts) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const GoldenPrompt& prompt = golden.Prompt("len7");
  const GoldenTensor& want = golden.Tensor("step_logits.len7");
  constexpr std::size_t kSteps = 16;
  // The prompt and the reference's tokens: the logits of its last positions chose those tokens.
  std::vector<std::int32_t> ids = prompt.ids;
  ids.insert(ids.end(), prompt.greedy.begin(), prompt.greedy.begin() + kSteps - 1);
  const auto reference = ReferenceModel(dir, WeightFormat::kBFloat16, DType::kBFloat16).Logits(ids);

  LocalGroupOptions options = OptionsOf(dir, {2, 2, 16, 2, DcpExchange::kA2a});
  options.model.dtype = DType::kBFloat16;
  options.model.kv_cache_dtype = DType::kBFloat16;
  options.rank.gather_all_logits = true;
  Logits logits;
  OnLeader(options, [&](PlanRunner& runner) { return runner.Run(ids, 0, kSteps, logits); });
  ASSERT_EQ(logits.size(), kSteps);
  double allowed = 0;  // what the reference loses in this precision
  double lost = 0;
  double range = 0;
  for (std::size_t i = 0; i < kSteps; ++i) {
    const auto row = absl::MakeConstSpan(want.values).subspan(i * want.shape[1], want.shape[1]);
    const auto [low, high] = std::minmax_element(row.begin(), row.end());
    range = std::max(range, double{*high} - *low);
    const auto& rounded = reference[i + ids.size() - kSteps];
    allowed =
        std::max(allowed, MaxDifference(std::vector<float>(rounded.begin(), rounded.end()), row));
    lost = std::max(lost, MaxDifference(logits[i], row));
  }
  EXPECT_LE(lost, 2 * allowed);
  EXPECT_LE(lost, 0.02 * range + (allowed > 0.02 * range ? allowed : 0));
}

}  // namespace
}  // namespace weft
