// Log-probabilities by the engine against the reference implementation's.

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/golden.h"
#include "tests/worker/family_checkpoints.h"
#include "tests/worker/local_group.h"

namespace weft {
namespace {

struct GroupRun {
  int tp, dcp;
  bool disturbed;
};
constexpr GroupRun kRuns[] = {
    {1, 1, false}, {1, 1, true}, {2, 2, false}, {2, 2, true}, {3, 3, true}};

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, const GroupRun& run) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {
      .tensor_parallel_size = run.tp, .decode_context_parallel_size = run.dcp, .block_size = 12};
  options.model.num_blocks = 100;
  options.model.max_model_len = 200;
  options.rank.stall_timeout = absl::Seconds(20);
  if (run.disturbed) {
    options.model.max_num_batched_tokens = 13;
    options.model.max_num_seqs = 3;
    options.force_preemption_every = 3;
  }
  return options;
}

EngineRequest Request(std::vector<std::int32_t> prompt, std::int32_t max_tokens,
                      LogitsParams logits) {
  EngineRequest request;
  request.prompt_token_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  request.logits = std::make_shared<const LogitsParams>(std::move(logits));
  return request;
}

void ExpectPromptLogprobs(const Completion& completion, absl::Span<const std::int32_t> ids,
                          absl::Span<const float> want) {
  ASSERT_TRUE(completion.status.ok()) << completion.status;
  ASSERT_EQ(completion.prompt_logprobs.size(), ids.size() - 1);
  ASSERT_EQ(want.size(), ids.size() - 1);
  for (std::size_t i = 1; i < ids.size(); ++i) {
    const TokenLogprob& token = completion.prompt_logprobs[i - 1].token;
    EXPECT_EQ(token.token_id, ids[i]);
    EXPECT_NEAR(token.logprob, want[i - 1], 1e-3) << "token " << i;
  }
}

class LogprobsTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, LogprobsTest, ::testing::ValuesIn(kFamilyCheckpoints),
                         [](const auto& test_case) { return std::string(test_case.param); });

TEST_P(LogprobsTest, OfThePromptAreTheReferences) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const GoldenPrompt& prompt = golden.Prompt("len33");
  for (const GroupRun& run : kRuns) {
    SCOPED_TRACE(fmt::format("T={} N={} disturbed {}", run.tp, run.dcp, run.disturbed));
    auto group = LocalGroup::Start(OptionsOf(dir, run));
    ASSERT_TRUE(group.ok()) << group.status();
    // The prompt is in the prefix cache, and no use.
    (*group)->Generate({Request(prompt.ids, 1, {})});
    // Others run beside them, with and without.
    std::vector<EngineRequest> requests;
    for (int i = 0; i < 3; ++i) requests.push_back(Request(prompt.ids, 5, {.prompt_logprobs = i}));
    requests.push_back(Request(golden.Prompt("len130").ids, 48, {.logprobs = 0}));
    requests.push_back(Request({7}, 3, {.prompt_logprobs = 4}));  // has none
    const std::vector<Completion> completions = (*group)->Generate(std::move(requests));
    for (std::size_t i = 0; i < 3; ++i) {
      ExpectPromptLogprobs(completions[i], prompt.ids,
                           golden.Tensor("prompt_logprobs.len33").values);
      EXPECT_EQ(completions[i].token_ids,
                std::vector(prompt.greedy.begin(), prompt.greedy.begin() + 5));
      EXPECT_TRUE(completions[i].logprobs.empty());
      for (const PositionLogprobs& position : completions[i].prompt_logprobs) {
        EXPECT_EQ(position.top.size(), i);
      }
    }
    EXPECT_EQ(completions[3].token_ids, golden.Prompt("len130").greedy);
    EXPECT_TRUE(completions[4].status.ok());
    EXPECT_TRUE(completions[4].prompt_logprobs.empty());
  }
}

TEST_P(LogprobsTest, OfTheOutputAreTheLogSoftmaxOfTheReferencesLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  const GoldenPrompt& prompt = golden.Prompt("len7");
  const GoldenTensor& logits = golden.Tensor("step_logits.len7");
  const auto vocab = static_cast<std::int32_t>(logits.shape[1]);
  for (const GroupRun& run : {GroupRun{1, 1, false}, {2, 2, true}}) {
    SCOPED_TRACE(fmt::format("T={} N={} disturbed {}", run.tp, run.dcp, run.disturbed));
    auto group = LocalGroup::Start(OptionsOf(dir, run));
    ASSERT_TRUE(group.ok()) << group.status();
    for (std::int32_t num_top : {0, 5, vocab}) {
      const Completion completion =
          (*group)->Generate({Request(prompt.ids, 48, {.logprobs = num_top})})[0];
      EXPECT_EQ(completion.token_ids, prompt.greedy);
      ASSERT_EQ(completion.logprobs.size(), 48U);
      for (std::size_t i = 0; i < 48; ++i) {
        SCOPED_TRACE(fmt::format("{} most probable, token {}", num_top, i));
        const auto row = absl::MakeConstSpan(logits.values).subspan(i * vocab, vocab);
        double sum = 0;
        for (float logit : row) sum += std::exp(double{logit});
        std::vector<float> sorted(row.begin(), row.end());
        std::sort(sorted.rbegin(), sorted.rend());
        const PositionLogprobs& got = completion.logprobs[i];
        EXPECT_EQ(got.token.rank, 1);
        EXPECT_NEAR(got.token.logprob, row[prompt.greedy[i]] - std::log(sum), 1e-3);
        ASSERT_EQ(got.top.size(), static_cast<std::size_t>(num_top));
        std::vector<bool> seen(vocab);
        for (std::int32_t j = 0; j < num_top; ++j) {
          ASSERT_EQ(got.top[j].rank, j + 1);
          ASSERT_NEAR(got.top[j].logprob, row[got.top[j].token_id] - std::log(sum), 1e-3);
          ASSERT_NEAR(got.top[j].logprob, sorted[j] - std::log(sum), 1e-3);
          ASSERT_FALSE(seen[got.top[j].token_id]);
          seen[got.top[j].token_id] = true;
        }
      }
    }
  }
}

TEST(SmolLm2LogprobsTest, OfThePromptAreTheReferences) {
  WEFT_GOLDEN_OR_SKIP(path, "smollm2.json");
  const std::filesystem::path model = WEFT_SOURCE_DIR "/models/smollm2-135m-instruct-fp32";
  if (!std::filesystem::exists(model)) {
    if (std::getenv("CI") != nullptr) FAIL() << model << " is missing";
    GTEST_SKIP() << model << " is missing: scripts/fetch_model.sh makes it";
  }
  const nlohmann::json reference = nlohmann::json::parse(std::ifstream(path));
  for (const GroupRun& run : {GroupRun{1, 1, false}, GroupRun{2, 2, false}}) {
    SCOPED_TRACE(fmt::format("T={} N={}", run.tp, run.dcp));
    auto group = LocalGroup::Start(OptionsOf(model, run));
    ASSERT_TRUE(group.ok()) << group.status();
    for (const auto& prompt : reference["prompts"]) {
      const auto& fp32 = prompt["fp32"];
      if (!fp32.contains("prompt_logprobs")) continue;  // the longest has none
      const std::vector<std::int32_t> ids = prompt["ids"];
      const auto& logprobs = fp32["prompt_logprobs"];  // null for the first token
      const std::vector<float> want(logprobs.begin() + 1, logprobs.end());
      const std::vector<std::int32_t> greedy = fp32["greedy"];
      const auto max_tokens = std::min<std::int32_t>(8, static_cast<std::int32_t>(greedy.size()));
      const Completion completion =
          (*group)->Generate({Request(ids, max_tokens, {.prompt_logprobs = 1})})[0];
      ExpectPromptLogprobs(completion, ids, want);
      EXPECT_EQ(completion.token_ids, std::vector(greedy.begin(), greedy.begin() + max_tokens));
    }
  }
}

}  // namespace
}  // namespace weft
