// What start-up says that --dcp-replicate-query costs and saves is what it costs and saves.

#include <string>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/status_macros.h"
#include "tests/golden.h"
#include "tests/worker/plan_runner.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

LocalGroupOptions OptionsOf(const std::filesystem::path& dir, bool replicate) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = 4,
                          .decode_context_parallel_size = 2,
                          .block_size = 16,
                          .replicate_query = replicate};
  options.model.max_model_len = 64;
  options.model.num_blocks = 8;
  options.rank.stall_timeout = absl::Seconds(20);
  options.rank.mla_form = MlaForm::kAbsorbed;
  return options;
}

// What rank 0 receives in collectives for one step of `rows` rows.
std::int64_t Received(LocalGroupOptions options, std::int32_t rows) {
  std::int64_t received = 0;
  options.drive = [&](Rank& rank) {
    PlanRunner runner(rank, options);
    Logits logits;
    RETURN_IF_ERROR(runner.Run(std::vector<std::int32_t>(rows, 5), 0, 0, logits));
    received = static_cast<std::int64_t>(rank.counters().collective_received_bytes);
    return absl::OkStatus();
  };
  EXPECT_TRUE(LocalGroup::Start(options).status().ok());
  return received;
}

class ReplicatedQueryTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, ReplicatedQueryTest,
                         ::testing::Values("llama_gqa", "qwen2", "deepseek_v2_lite", "deepseek_v3",
                                           "deepseek_v3_noqlora"),
                         [](const auto& test_case) { return std::string(test_case.param); });

TEST_P(ReplicatedQueryTest, CostsAndSavesWhatStartUpPrints) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  kernels::CpuStream stream(1);
  const auto load = [&](bool replicate) {
    return RankModel::Load(OptionsOf(dir, replicate).model, stream, [](int, int) {});
  };
  const auto gathered = load(false);
  const auto replicated = load(true);
  ASSERT_TRUE(gathered.ok()) << gathered.status();
  ASSERT_TRUE(replicated.ok()) << replicated.status();
  const auto count = [](const RankModel& model) {
    return CountWeights(model.config, model.layout, false).total();
  };
  const std::int64_t more = count(*replicated) - count(*gathered);
  EXPECT_GT(more, 0);
  EXPECT_EQ(ReplicatedQueryWeights(replicated->config, replicated->layout), more);
  EXPECT_GT(replicated->weights.SizeBytes(), gathered->weights.SizeBytes());

  constexpr std::int32_t kRows = 16;
  const std::int64_t saved =
      Received(OptionsOf(dir, false), kRows) - Received(OptionsOf(dir, true), kRows);
  EXPECT_GT(saved, 0);
  EXPECT_THAT(replicated->Summary(8, 64),
              HasSubstr(fmt::format("queries: projected by every rank of a DCP group for all its "
                                    "heads; {:.1f} MB more weights on rank 0, {} bytes fewer "
                                    "received per token",
                                    static_cast<double>(more) * 4 / 1e6, saved / kRows)));
  EXPECT_THAT(gathered->Summary(8, 64), Not(HasSubstr("queries: ")));
}

}  // namespace
}  // namespace weft
