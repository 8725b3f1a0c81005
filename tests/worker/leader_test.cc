// A whole group in one process: what a request costs while it runs and what is left after it.

#include "worker/leader.h"

#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/worker/local_group.h"

namespace weft {
namespace {

// Follows one request as it goes.
class WatchingSink final : public TokenSink {
 public:
  void OnEvent(const TokenEvent& event) override {
    MutexLock lock(mutex_);
    num_tokens_ += event.token_id.has_value();
    finish_ = event.finish;
    changed_.NotifyAll();
  }
  void OnRefused(const absl::Status& status) override {
    ADD_FAILURE() << status;
    MutexLock lock(mutex_);
    finish_ = FinishReason::kError;
    changed_.NotifyAll();
  }
  // False when it has not got there after 20 s.
  bool AwaitTokens(int count) {
    return Await([this, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return num_tokens_ >= count; });
  }
  bool AwaitEnd() {
    return Await([this]()
                     ABSL_NO_THREAD_SAFETY_ANALYSIS { return finish_ != FinishReason::kNone; });
  }
  FinishReason finish() const {
    MutexLock lock(mutex_);
    return finish_;
  }
  int num_tokens() const {
    MutexLock lock(mutex_);
    return num_tokens_;
  }

 private:
  template <typename Condition>
  bool Await(const Condition& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(mutex_);
    while (!condition()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }

  mutable Mutex mutex_;
  CondVar changed_;
  int num_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  FinishReason finish_ ABSL_GUARDED_BY(mutex_) = FinishReason::kNone;
};

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, int tp, int dcp) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {
      .tensor_parallel_size = tp, .decode_context_parallel_size = dcp, .block_size = 12};
  options.model.num_blocks = 100;
  options.model.max_model_len = 500;
  options.rank.stall_timeout = absl::Seconds(20);
  return options;
}

EngineRequest Request(std::vector<std::int32_t> prompt, std::int32_t max_tokens) {
  EngineRequest request;
  request.prompt_token_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  return request;
}

// The steps until all blocks are free, as of now; -1 when they never are.
int StepsUntilFree(Leader& leader) {
  const std::uint64_t start = leader.Stats().steps;
  for (int i = 0; i < 5000; ++i) {
    const EngineStats stats = leader.Stats();
    if (stats.num_free_blocks == stats.num_blocks) return static_cast<int>(stats.steps - start);
    absl::SleepFor(absl::Milliseconds(1));
  }
  return -1;
}

class LeaderTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Planning, LeaderTest, ::testing::Bool(), [](const auto& test_case) {
  return test_case.param ? "Ahead" : "StepByStep";
});

TEST_P(LeaderTest, PlansReachEveryRank) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_odd");
  const GoldenPrompt prompt = LoadGolden(dir).Prompt("len7");
  LocalGroupOptions options = OptionsOf(dir, 3, 3);
  options.async_scheduling = GetParam();
  options.rank.stall_timeout = absl::Seconds(5);
  auto group = LocalGroup::Start(options);
  ASSERT_TRUE(group.ok()) << group.status();
  const auto sink = std::make_shared<WatchingSink>();
  ASSERT_TRUE((*group)->leader().Submit(Request(prompt.ids, 48), sink).ok());
  // A rank without the plan ends the group, and nobody tells the request.
  while (sink->finish() == FinishReason::kNone && (*group)->status().ok()) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE((*group)->status().ok()) << (*group)->status();
  EXPECT_EQ(sink->num_tokens(), 48);
}

TEST_P(LeaderTest, ACancelledRequestsBlocksAreFreeOneStepLater) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  LocalGroupOptions options = OptionsOf(dir, 2, 2);
  options.async_scheduling = GetParam();
  auto group = LocalGroup::Start(options);
  ASSERT_TRUE(group.ok()) << group.status();
  Leader& leader = (*group)->leader();
  for (int round = 0; round < 20; ++round) {
    const auto sink = std::make_shared<WatchingSink>();
    const auto id = leader.Submit(Request(std::vector<std::int32_t>(30, 5), 400), sink);
    ASSERT_TRUE(id.ok()) << id.status();
    ASSERT_TRUE(sink->AwaitTokens(round));  // in the prompt too
    EXPECT_EQ(sink->finish(), FinishReason::kNone);
    leader.Cancel(*id);
    ASSERT_TRUE(sink->AwaitEnd());
    const int steps = StepsUntilFree(leader);
    EXPECT_GE(steps, 0);
    EXPECT_LE(steps, 1);
    EXPECT_EQ(sink->finish(), FinishReason::kAborted);
  }
}

TEST_P(LeaderTest, AnExpiredRequestsBlocksAreFreeOneStepLater) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  LocalGroupOptions options = OptionsOf(dir, 2, 2);
  options.async_scheduling = GetParam();
  auto group = LocalGroup::Start(options);
  ASSERT_TRUE(group.ok()) << group.status();
  Leader& leader = (*group)->leader();
  const auto expired = std::make_shared<WatchingSink>();
  EngineRequest request = Request(std::vector<std::int32_t>(30, 5), 450);
  request.deadline = absl::Now() + absl::Milliseconds(15);
  ASSERT_TRUE(leader.Submit(std::move(request), expired).ok());
  ASSERT_TRUE(expired->AwaitEnd());
  const int steps = StepsUntilFree(leader);
  EXPECT_GE(steps, 0);
  EXPECT_LE(steps, 1);
  EXPECT_EQ(expired->finish(), FinishReason::kDeadline);
  EXPECT_LT(expired->num_tokens(), 450);
}

TEST_P(LeaderTest, OthersGoOnWhenOneIsCancelled) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  const Golden golden = LoadGolden(dir);
  LocalGroupOptions options = OptionsOf(dir, 2, 2);
  options.async_scheduling = GetParam();
  auto group = LocalGroup::Start(options);
  ASSERT_TRUE(group.ok()) << group.status();
  for (int tokens : {0, 1, 2, 5}) {
    const auto sink = std::make_shared<WatchingSink>();
    const auto id = (*group)->leader().Submit(Request({1, 2, 3}, 400), sink);
    ASSERT_TRUE(id.ok());
    ASSERT_TRUE(sink->AwaitTokens(tokens));
    std::vector<EngineRequest> requests;
    for (const char* name : {"len7", "len33"}) {
      requests.push_back(Request(golden.Prompt(name).ids, 48));
    }
    (*group)->leader().Cancel(*id);
    const std::vector<Completion> completions = (*group)->Generate(std::move(requests));
    EXPECT_EQ(completions[0].token_ids, golden.Prompt("len7").greedy);
    EXPECT_EQ(completions[1].token_ids, golden.Prompt("len33").greedy);
  }
}

// One KV head: two ranks that split heads hold it twice, two that split positions once.
TEST(GroupMemoryTest, SharingPositionsServesWhatOneRanksBudgetCannot) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_mqa");
  const GoldenPrompt prompt = LoadGolden(dir).Prompt("len130");
  for (int dcp : {1, 2}) {
    LocalGroupOptions options = OptionsOf(dir, 2, dcp);
    options.model.layout.block_size = 16;
    options.model.num_blocks = std::nullopt;
    options.model.max_model_len = std::nullopt;  // auto
    // 96 tokens a rank: 2 layers of K and V, 1 head of 16 fp32.
    options.model.kv_cache_memory_bytes = 96 * 2 * 2 * 16 * 4;
    auto group = LocalGroup::Start(options);
    ASSERT_TRUE(group.ok()) << group.status();
    EXPECT_EQ((*group)->max_model_len(), 96 * dcp);
    const Completion completion = (*group)->Generate({Request(prompt.ids, 48)})[0];
    if (dcp == 1) {
      EXPECT_EQ(completion.status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_NE(completion.status.message().find("130"), absl::string_view::npos)
          << completion.status;
      EXPECT_NE(completion.status.message().find("96"), absl::string_view::npos)
          << completion.status;
    } else {
      EXPECT_TRUE(completion.status.ok()) << completion.status;
      EXPECT_EQ(completion.token_ids, prompt.greedy);
    }
  }
}

std::int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0;
  std::int64_t resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(GroupMemoryTest, DoesNotGrowOverAThousandRequests) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  auto group = LocalGroup::Start(OptionsOf(dir, 2, 2));
  ASSERT_TRUE(group.ok()) << group.status();
  const auto run = [&](int batches) {
    for (int batch = 0; batch < batches; ++batch) {
      std::vector<EngineRequest> requests;
      for (int i = 0; i < 50; ++i) {
        requests.push_back(Request(std::vector<std::int32_t>(1 + i % 40, i), 4));
        requests.back().sampling = {.top_p = i % 3 == 0 ? 0.9F : 1.0F,
                                    .seed = static_cast<std::uint64_t>(i)};
      }
      for (const Completion& completion : (*group)->Generate(std::move(requests))) {
        EXPECT_TRUE(completion.status.ok()) << completion.status;
      }
    }
  };
  run(4);
  const std::int64_t after_200 = ResidentBytes();
  run(16);
  const std::int64_t after_1000 = ResidentBytes();
  EXPECT_LE(after_1000 - after_200, 1 << 20);
}

}  // namespace
}  // namespace weft
