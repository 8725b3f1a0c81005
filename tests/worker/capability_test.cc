// The capability table: every cell it supports is run, every cell it refuses is refused at start,
// and the README shows what came of it.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "nlohmann/json.hpp"
#include "server/capabilities.h"
#include "tests/golden.h"
#include "tests/temp_dir.h"
#include "tests/worker/local_group.h"
#include "tests/worker/pd_pair.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Goldens have no window beside experts.
const char* CheckpointOf(AttentionKind kind, Feature feature) {
  const bool experts = feature == Feature::kExpertParallel;
  switch (kind) {
    case AttentionKind::kGqa:
      return experts ? "qwen3_moe_norm" : "llama_gqa";
    case AttentionKind::kSlidingWindow:
      return experts ? nullptr : "mistral_window";
    case AttentionKind::kMla:
      return "deepseek_v2_lite";
    case AttentionKind::kSparseMla:
      return "deepseek_v32";
  }
  return nullptr;
}

LocalGroupOptions OptionsOf(Device device, Feature feature, const std::filesystem::path& dir) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.device = device;
  options.model.features = {feature};
  options.model.layout = {.tensor_parallel_size = 2,
                          .decode_context_parallel_size = 2,
                          .block_size = 8,
                          .interleave = 2,
                          .replicate_query = feature == Feature::kReplicatedQueries};
  options.model.max_model_len = 192;
  options.model.num_blocks = feature == Feature::kPreemption ? 30 : 100;
  options.model.max_num_batched_tokens = feature == Feature::kChunkedPrefill ? 7 : 256;
  options.model.expert_parallel = feature == Feature::kExpertParallel;
  if (feature == Feature::kA2aExchange) options.model.exchange = DcpExchange::kA2a;
  options.rank.stall_timeout = absl::Seconds(20);
  options.async_scheduling = feature == Feature::kAsyncScheduling;
  options.enable_prefix_caching = feature == Feature::kPrefixCaching;
  if (feature == Feature::kPreemption) options.force_preemption_every = 5;
  if (feature == Feature::kKvTransfer) options.kv = KvMoverOptions{};
  if (device == Device::kCudaEmu) {
    options.open_device =
        [](int rank,
           kernels::CpuStream& host) -> absl::StatusOr<std::unique_ptr<kernels::DeviceStream>> {
      return kernels::cuda::CudaDevice::Open(rank, host);
    };
  }
  return options;
}

// By a group of one rank and another that goes on.
void ExpectTheReferencesTokensAfterAHandOff(const LocalGroupOptions& decode_options) {
  const Golden golden = LoadGolden(decode_options.model.model_dir);
  LocalGroupOptions prefill_options = decode_options;
  prefill_options.model.layout = {.tensor_parallel_size = 1, .block_size = 16};
  auto prefill = LocalGroup::Start(prefill_options);
  auto decode = LocalGroup::Start(decode_options);
  ASSERT_TRUE(prefill.ok() && decode.ok()) << prefill.status() << decode.status();
  PdPair pair(**prefill, **decode);
  const bool slow = decode_options.model.device == Device::kCudaEmu;
  const GoldenPrompt& prompt = golden.Prompt(slow ? "len33" : "len130");
  std::vector<std::int32_t> greedy = prompt.greedy;
  if (slow) greedy.resize(6);
  EngineRequest request;
  request.prompt_token_ids = prompt.ids;
  request.max_tokens = static_cast<std::int32_t>(greedy.size());
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  EXPECT_EQ(pair.Generate({std::move(request)}).front().token_ids, greedy);
  EXPECT_EQ(pair.num_recomputed(), 0);
  EXPECT_GT((*decode)->kv_counters().received_bytes, 0);
}

void ExpectTheReferencesTokens(const LocalGroupOptions& options) {
  const Golden golden = LoadGolden(options.model.model_dir);
  auto group = LocalGroup::Start(options);
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<const char*> names = {"len7", "len33", "len130"};
  int num_tokens = 48;
  if (options.model.device == Device::kCudaEmu) {  // which is slow
    names.pop_back();
    num_tokens = 6;
  }
  int preemptions = 0;
  int cached = 0;
  // The second time what the first has left may be found.
  for (int run = 0; run < 2; ++run) {
    std::vector<EngineRequest> requests;
    for (const char* name : names) {
      const GoldenPrompt& prompt = golden.Prompt(name);
      EngineRequest request;
      request.prompt_token_ids = prompt.ids;
      request.max_tokens = num_tokens;
      request.ignore_eos = true;
      request.sampling.temperature = 0;
      requests.push_back(std::move(request));
    }
    const std::vector<Completion> completions = (*group)->Generate(std::move(requests));
    auto completion = completions.begin();
    for (const char* name : names) {
      EXPECT_TRUE(completion->status.ok()) << completion->status;
      std::vector<std::int32_t> greedy = golden.Prompt(name).greedy;
      greedy.resize(num_tokens);
      EXPECT_EQ(completion->token_ids, greedy) << name;
      preemptions += completion->num_preemptions;
      cached += completion->num_cached_tokens;
      ++completion;
    }
  }
  EXPECT_EQ(preemptions > 0, options.force_preemption_every > 0);
  EXPECT_EQ(cached > 0, options.enable_prefix_caching);
}

// Runs the cell, or sees it refused.
void CheckCell(Device device, AttentionKind kind, Feature feature) {
  const Capability capability = CapabilityOf(device, kind, feature);
  const char* const checkpoint = CheckpointOf(kind, feature);
  if (checkpoint == nullptr) return;
  const auto dir = GoldenPath(checkpoint);
  if (!dir.has_value()) {
    EXPECT_EQ(std::getenv("CI"), nullptr) << "golden " << checkpoint << " is missing";
    std::printf("golden %s is missing: left out\n", checkpoint);
    return;
  }
  const LocalGroupOptions options = OptionsOf(device, feature, *dir);
  if (capability.support != Support::kRefused) {
    options.kv.has_value() ? ExpectTheReferencesTokensAfterAHandOff(options)
                           : ExpectTheReferencesTokens(options);
    return;
  }
  const absl::Status status = RankModel::Check(options.model);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  // A sparse model is refused when its config is read, whatever the device.
  const bool by_config = kind == AttentionKind::kSparseMla;
  const std::string_view reason =
      by_config ? CapabilityOf(Device::kCpu, kind, feature).reason : capability.reason;
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(reason)));
}

TEST(CapabilityTest, EveryCellRunsOrIsRefusedAtStart) {
  for (Device device : kDevices) {
    for (AttentionKind kind : kAttentionKinds) {
      for (Feature feature : kFeatures) {
        if (device == Device::kCuda) {  // there is none here: its cells are those of cuda-emu
          EXPECT_EQ(CapabilityOf(device, kind, feature).support,
                    CapabilityOf(Device::kCudaEmu, kind, feature).support);
          continue;
        }
        SCOPED_TRACE(fmt::format("{} {} {}", DeviceName(device), AttentionKindName(kind),
                                 FeatureName(feature)));
        CheckCell(device, kind, feature);
      }
    }
  }
}

std::string Table() {
  const auto words = [](Capability capability) {
    return capability.support == Support::kSupported      ? "yes"
           : capability.support == Support::kExperimental ? "experimental"
                                                          : "refused";
  };
  std::string text = "| `--device=cpu`, with DCP |";
  std::string rule = "|---|";
  for (AttentionKind kind : kAttentionKinds) {
    text += fmt::format(" {} |", AttentionKindName(kind));
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (Feature feature : kFeatures) {
    const std::string name(FeatureName(feature));
    text += fmt::format("| {} |", name.starts_with("--") ? "`" + name + "`" : name);
    for (AttentionKind kind : kAttentionKinds) {
      text += fmt::format(" {} |", words(CapabilityOf(Device::kCpu, kind, feature)));
    }
    text += "\n";
  }
  return text;
}

TEST(CapabilityTest, TheReadmeHasTheTable) {
  std::stringstream readme;
  readme << std::ifstream(WEFT_SOURCE_DIR "/README.md").rdbuf();
  EXPECT_THAT(readme.str(), HasSubstr(Table()));
}

TEST(CapabilityTest, WhatTheKernelsOfDevicesDoNotTakeIsRefusedAtStart) {
  struct Case {
    const char* checkpoint;
    const char* key;
    std::int32_t value;
    const char* says;
  };
  for (const Case& c : {Case{"llama_gqa", "hidden_size", 16392, "hidden_size is 16392"},
                        Case{"deepseek_v3", "q_lora_rank", 16385, "q_lora_rank is 16385"},
                        Case{"deepseek_v3", "qk_rope_head_dim", 520, "qk_rope_head_dim is 520"},
                        Case{"mixtral", "num_local_experts", 1025, "experts is 1025"}}) {
    WEFT_GOLDEN_OR_SKIP(golden, c.checkpoint);
    nlohmann::json config = nlohmann::json::parse(std::ifstream(golden / "config.json"));
    config[c.key] = c.value;
    const TempDir dir;
    std::ofstream(dir.path() / "config.json") << config;
    for (const Device device : {Device::kCuda, Device::kCudaEmu, Device::kCpu}) {
      const absl::Status status = RankModel::Check({.model_dir = dir.path(), .device = device});
      EXPECT_FALSE(status.ok());
      if (device == Device::kCpu) {
        EXPECT_THAT(std::string(status.message()), Not(HasSubstr("--device=cpu")));
      } else {
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
      }
    }
  }
}

TEST(CapabilityTest, WhatIsExperimentalWarns) {
  const std::vector<CapabilityRule> rules = {
      {.kinds = {AttentionKind::kMla},
       .features = {Feature::kA2aExchange, Feature::kPreemption},
       .capability = {Support::kExperimental, "few have tried it"}},
      {.features = {Feature::kPreemption}, .capability = {Support::kRefused, "not here"}}};
  const Feature features[] = {Feature::kChunkedPrefill, Feature::kA2aExchange};
  const auto mla = CheckCapabilities(Device::kCpu, AttentionKind::kMla, features, rules);
  ASSERT_TRUE(mla.ok()) << mla.status();
  EXPECT_THAT(*mla,
              ElementsAre("--dcp-comm-backend=a2a with MLA: experimental: few have tried it"));
  const auto gqa = CheckCapabilities(Device::kCpu, AttentionKind::kGqa, features, rules);
  ASSERT_TRUE(gqa.ok()) << gqa.status();
  EXPECT_THAT(*gqa, ElementsAre());
  const Feature preemption[] = {Feature::kPreemption};
  const auto refused = CheckCapabilities(Device::kCpu, AttentionKind::kGqa, preemption, rules);
  EXPECT_EQ(refused.status(), absl::InvalidArgumentError("preemption: not here"));
}

}  // namespace
}  // namespace weft
