// Law 2 for the CUDA backend, under emulation: in fp32 its tokens are the reference's, over
// layouts; in lower precision its logits lose at most twice what the precision costs.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "tests/golden.h"
#include "tests/worker/family_checkpoints.h"
#include "tests/worker/pd_pair.h"
#include "tests/worker/plan_runner.h"
#include "tests/worker/reference_model.h"

namespace weft {
namespace {

constexpr std::int64_t kMaxLen = 192;

struct Layout {
  int tp, dcp, block_size, interleave;
  DcpExchange exchange = DcpExchange::kAgRs;

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

EngineRequest Greedy(const Golden& golden, const std::string& prompt, int num_tokens) {
  EngineRequest request;
  request.prompt_token_ids = golden.Prompt(prompt).ids;
  request.max_tokens = num_tokens;
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  return request;
}

// Products of experts are slow under emulation: one of those models has every case, the others a
// short one.
bool IsSlow(const std::string& name, const std::filesystem::path& dir) {
  return LoadModelConfig(dir)->moe.has_value() && name != "deepseek_v2_lite";
}

// Prompts of several lengths at once, so that steps have prompts' rows beside decoded ones.
TEST_P(CudaEmuGroupTest, GreedyTokensAreTheReferences) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  for (const Layout& layout :
       {Layout{1, 1, 16, 1, DcpExchange::kAgRs}, Layout{2, 2, 16, 2, DcpExchange::kAgRs},
        Layout{2, 2, 48, 4, DcpExchange::kA2a}}) {
    const bool slow = IsSlow(GetParam(), dir);
    if (slow && layout.exchange != DcpExchange::kA2a) continue;
    SCOPED_TRACE(layout.Name());
    LocalGroupOptions options = OptionsOf(dir, layout);
    options.model.max_num_seqs = 4;
    options.rank.graphs = true;
    auto group = LocalGroup::Start(options);
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<EngineRequest> requests;
    std::vector<std::string> names = {"len1", "len7", "len33"};
    if (slow) names.pop_back();
    const int num_tokens = slow ? 4 : 12;
    for (const std::string& name : names) requests.push_back(Greedy(golden, name, num_tokens));
    const std::vector<Completion> done = (*group)->Generate(std::move(requests));
    for (std::size_t i = 0; i < names.size(); ++i) {
      ASSERT_TRUE(done[i].status.ok()) << done[i].status << (*group)->status();
      const std::vector<std::int32_t>& greedy = golden.Prompt(names[i]).greedy;
      EXPECT_EQ(done[i].token_ids,
                std::vector<std::int32_t>(greedy.begin(), greedy.begin() + num_tokens))
          << names[i];
    }
  }
}

std::vector<EngineRequest> ManyRequests(const Golden& golden, int count) {
  std::vector<EngineRequest> requests;
  for (int i = 0; i < count; ++i) {
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
  return requests;
}

// Tables, lengths and seeds change from step to step, and so does the number of sequences: what a
// graph has kept of the step that it was recorded in would show.
TEST_P(CudaEmuGroupTest, AReplayGivesTheBitsOfLaunchesOneByOne) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  if (IsSlow(GetParam(), dir)) return;
  const bool experts = LoadModelConfig(dir)->moe.has_value();
  const Golden golden = LoadGolden(dir);
  for (const Layout& layout :
       {Layout{1, 1, 16, 1, DcpExchange::kAgRs}, Layout{2, 2, 16, 2, DcpExchange::kA2a}}) {
    SCOPED_TRACE(layout.Name());
    LocalGroupOptions options = OptionsOf(dir, layout);
    options.model.max_num_seqs = experts ? 2 : 5;
    options.model.max_num_batched_tokens = 40;
    std::vector<Completion> done[2];
    for (const bool graphs : {false, true}) {
      options.rank.graphs = graphs;
      auto group = LocalGroup::Start(options);
      ASSERT_TRUE(group.ok()) << group.status();
      done[graphs] = (*group)->Generate(ManyRequests(golden, experts ? 3 : 7));
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
}

// The emulated NCCL takes no other memory then.
TEST(CudaEmuSymmetricMemoryTest, AllThatRanksExchangeIsInIt) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  const Golden golden = LoadGolden(dir);
  for (const Layout& layout :
       {Layout{2, 2, 16, 2, DcpExchange::kAgRs}, Layout{2, 2, 16, 2, DcpExchange::kA2a}}) {
    SCOPED_TRACE(layout.Name());
    LocalGroupOptions options = OptionsOf(dir, layout);
    options.model.max_num_seqs = 2;
    options.rank.graphs = true;
    options.rank.symmetric_memory = true;
    auto group = LocalGroup::Start(options);
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<EngineRequest> requests = {Greedy(golden, "len7", 4), Greedy(golden, "len1", 4)};
    requests[1].sampling = {.temperature = 1.0F, .top_p = 0.5F, .seed = 1};
    const std::vector<Completion> done = (*group)->Generate(std::move(requests));
    ASSERT_TRUE(done[0].status.ok() && done[1].status.ok()) << done[0].status << done[1].status;
    const std::vector<std::int32_t>& greedy = golden.Prompt("len7").greedy;
    EXPECT_EQ(done[0].token_ids, std::vector<std::int32_t>(greedy.begin(), greedy.begin() + 4));
  }
}

// Rows that filter are drawn on the device; who also asks for log-probabilities gets them whole to
// the leader, whose CPU draws of the same logits.
TEST(CudaEmuFilterTest, TheDeviceDrawsWhatTheLeadersCpuDraws) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  const Golden golden = LoadGolden(dir);
  const auto generate = [&](const Layout& layout, bool logprobs) {
    LocalGroupOptions options = OptionsOf(dir, layout);
    options.model.max_num_seqs = 5;
    options.rank.graphs = true;
    auto group = LocalGroup::Start(options);
    EXPECT_TRUE(group.ok()) << group.status();
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 7; ++i) {
      EngineRequest request = Greedy(golden, i % 2 == 0 ? "len7" : "len1", 10);
      request.sampling = {.temperature = i == 0 ? 0.0F : 0.7F * static_cast<float>(i),
                          .top_p = i % 3 == 0 ? 0.8F : 1.0F,
                          .top_k = i % 3 == 1 ? 9 : 0,
                          .min_p = i % 3 == 2 ? 0.2F : 0.0F,
                          .seed = static_cast<std::uint64_t>(i)};
      if (logprobs) {
        auto logits = std::make_shared<LogitsParams>();
        logits->logprobs = 0;
        request.logits = std::move(logits);
      }
      requests.push_back(std::move(request));
    }
    return (*group)->Generate(std::move(requests));
  };
  for (const Layout& layout : {Layout{1, 1, 16, 1}, Layout{2, 2, 16, 2}}) {
    SCOPED_TRACE(layout.Name());
    const std::vector<Completion> on_device = generate(layout, false);
    // Without a launch of that kernel.
    cuda_emu::SetFault("kernel FilteredSample after 0");
    const std::vector<Completion> on_cpu = generate(layout, true);
    cuda_emu::SetFault("");
    for (std::size_t i = 0; i < on_cpu.size(); ++i) {
      ASSERT_TRUE(on_device[i].status.ok() && on_cpu[i].status.ok())
          << on_device[i].status << on_cpu[i].status;
      EXPECT_EQ(on_device[i].token_ids, on_cpu[i].token_ids) << i;
    }
  }
}

TEST(CudaEmuFilterTest, ARowThatFiltersIsDrawnOnTheDevice) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  LocalGroupOptions options = OptionsOf(dir, {1, 1, 16, 1});
  absl::Status end;
  options.drive = [&](Rank& rank) {
    StepPlan plan;
    plan.step = 1;
    plan.table_deltas = {{.slot = 0, .first_index = 0, .num_blocks = 1}};
    plan.delta_blocks = {0};
    plan.sampling_deltas = {{.slot = 0, .params = {.top_k = 5}}};
    plan.sequences = {{.slot = 0, .num_rows = 1, .first_position = 0, .num_sampled = 1}};
    plan.token_ids = {1};
    cuda_emu::SetFault("kernel FilteredSample after 0");
    end = rank.RunStep(plan).status();
    cuda_emu::SetFault("");
    return end;
  };
  { const auto group = LocalGroup::Start(options); }
  EXPECT_NE(end.message().find("FilteredSample: an illegal memory access"), absl::string_view::npos)
      << end;
}

// Of a step that decodes one row, in bfloat16, of which a product rounds its input before it.
TEST(CudaEmuLaunchTest, AStepLaunchesWhatTheReadmeOfKernelsSays) {
  constexpr int kOfStep = 7;
  struct Case {
    const char* checkpoint;
    int attention, query_lora;
  };
  for (const Case& c :
       {Case{"llama_gqa", 11, 0}, Case{"qwen3", 13, 0}, Case{"deepseek_v2_lite", 14, 0},
        Case{"deepseek_v3", 14, 3}, Case{"mixtral", 11, 0}}) {
    WEFT_GOLDEN_OR_SKIP(dir, c.checkpoint);
    const ModelConfig config = *LoadModelConfig(dir);
    std::int64_t want = kOfStep;
    for (int layer = 0; layer < config.num_layers; ++layer) {
      want += c.attention + c.query_lora;
      want += !config.HasExperts(layer) ? 6 : config.moe->shared_intermediate_size > 0 ? 14 : 9;
    }
    LocalGroupOptions options = OptionsOf(dir, {1, 1, 16, 1});
    options.model.dtype = DType::kBFloat16;
    options.model.max_model_len = 16;  // keys are not split
    options.rank.gather_all_logits = true;
    std::int64_t launches = 0;
    OnLeader(options, [&](PlanRunner& runner) {
      Logits logits;
      const std::vector<std::int32_t> ids = {1};
      cuda_emu::ResetCounters();
      absl::Status status = runner.Run(ids, 0, 1, logits);
      launches = cuda_emu::CountersOfThread().launches;
      return status;
    });
    EXPECT_EQ(launches - 1, want) << c.checkpoint;  // one more for the logits that are looked at
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
  // Tensor cores take rounded inputs, whatever this CPU does.
  const auto reference = ReferenceModel(dir, WeightFormat::kBFloat16, DType::kBFloat16,
                                        DType::kBFloat16, /*rounds=*/true)
                             .Logits(ids);

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

// Prompts are computed by one group and continued by another: both on devices, or one on the CPU,
// whose KV is laid out otherwise.
class CudaEmuHandOffTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, CudaEmuHandOffTest,
                         ::testing::Values("llama_gqa", "llama_odd", "deepseek_v2_lite"),
                         [](const auto& test_case) { return std::string(test_case.param); });
TEST_P(CudaEmuHandOffTest, KvIsHandedOverBetweenDevicesAndToTheCpu) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  struct Pair {
    Device prefill, decode;
    Layout from, to;
  };
  // The last has tiles of K on both sides.
  for (const Pair& pair : {Pair{Device::kCudaEmu, Device::kCudaEmu, {2, 2, 16, 4}, {1, 1, 48, 1}},
                           Pair{Device::kCpu, Device::kCudaEmu, {1, 1, 16, 1}, {2, 2, 48, 2}},
                           Pair{Device::kCudaEmu, Device::kCpu, {1, 1, 32, 16}, {2, 2, 64, 16}}}) {
    SCOPED_TRACE(pair.from.Name() + " to " + pair.to.Name());
    const auto start = [&](const Layout& layout, Device device) {
      LocalGroupOptions options = OptionsOf(dir, layout);
      options.model.max_num_seqs = 4;
      options.kv = KvMoverOptions{.message_bytes = 2048, .window_bytes = 8192, .checksum = true};
      if (device == Device::kCpu) options.open_device = nullptr;
      options.model.device = device;
      return LocalGroup::Start(options);
    };
    auto prefill = start(pair.from, pair.prefill);
    auto decode = start(pair.to, pair.decode);
    ASSERT_TRUE(prefill.ok() && decode.ok()) << prefill.status() << decode.status();
    PdPair both(**prefill, **decode);
    std::vector<EngineRequest> requests;
    const std::vector<std::string> names = {"len1", "len7", "len33"};
    constexpr int kTokens = 6;
    for (const std::string& name : names) requests.push_back(Greedy(golden, name, kTokens));
    const std::vector<Completion> done = both.Generate(std::move(requests));
    EXPECT_EQ(both.num_recomputed(), 0);
    for (std::size_t i = 0; i < names.size(); ++i) {
      ASSERT_TRUE(done[i].status.ok()) << done[i].status;
      const std::vector<std::int32_t>& greedy = golden.Prompt(names[i]).greedy;
      EXPECT_EQ(done[i].token_ids,
                std::vector<std::int32_t>(greedy.begin(), greedy.begin() + kTokens))
          << names[i];
    }
    EXPECT_GT((*decode)->kv_counters().received_bytes, 0);
  }
}

// What the leader's steps end with once `fault` is there (kernels/cuda/emu/cudart.h).
absl::Status EndOfGroup(const std::filesystem::path& dir, const Layout& layout, bool graphs,
                        const std::string& fault) {
  LocalGroupOptions options = OptionsOf(dir, layout);
  options.rank.graphs = graphs;
  absl::Status end = absl::UnknownError("not run");
  options.drive = [&](Rank& rank) {
    PlanRunner runner(rank, options);
    Logits logits;
    const std::vector<std::int32_t> ids = {1};
    cuda_emu::SetFault(fault);
    for (int i = 0; i < 20; ++i) {
      end = runner.Run(ids, i, 1, logits);
      if (!end.ok()) break;
    }
    return end;
  };
  options.rank.gather_all_logits = true;
  const absl::Status started = LocalGroup::Start(options).status();
  cuda_emu::SetFault("");
  return started.ok() ? end : started;
}

TEST(CudaEmuFaultTest, AFailingCollectiveEndsTheGroup) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  for (const bool graphs : {false, true}) {
    const absl::Status end = EndOfGroup(dir, {2, 2, 16, 2}, graphs, "collective 1 after 30");
    EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable) << end;
    EXPECT_NE(end.message().find("step "), absl::string_view::npos) << end;
    EXPECT_NE(end.message().find("rank 1 has aborted"), absl::string_view::npos) << end;
  }
}

TEST(CudaEmuFaultTest, ALostDeviceIsReportedWithItsKernelAndStep) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  for (const bool graphs : {false, true}) {
    const absl::Status end = EndOfGroup(dir, {1, 1, 16, 1}, graphs, "kernel GumbelArgmax after 2");
    EXPECT_EQ(end.code(), absl::StatusCode::kInternal) << end;
    EXPECT_NE(end.message().find("step 3: "), absl::string_view::npos) << end;
    EXPECT_NE(end.message().find("GumbelArgmax: an illegal memory access"), absl::string_view::npos)
        << end;
  }
}

TEST(CudaEmuFaultTest, TooLittleMemoryIsAnErrorAtStartWithTheSizes) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  // Too little for products, for the weights, and for the workspace behind weights and KV.
  constexpr std::size_t kMega = std::size_t{1} << 20;
  for (const std::size_t bytes : {kMega, 32 * kMega + 50'000, 34 * kMega}) {
    cuda_emu::SetDeviceMemory(bytes);
    LocalGroupOptions options = OptionsOf(dir, {1, 1, 16, 1});
    absl::Status failed;
    options.drive = [](Rank&) { return absl::OkStatus(); };
    {
      const auto group = LocalGroup::Start(options);
      failed = group.status();
      for (int i = 0; i < 10000 && failed.ok(); ++i) {
        absl::SleepFor(absl::Milliseconds(1));
        failed = (*group)->status();
      }
    }
    cuda_emu::SetDeviceMemory(0);
    EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted) << bytes << failed;
    EXPECT_NE(failed.message().find(fmt::format("of {} bytes are free", bytes)),
              absl::string_view::npos)
        << failed;
  }
}

}  // namespace
}  // namespace weft
