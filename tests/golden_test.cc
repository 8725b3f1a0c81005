#include "tests/golden.h"

#include <algorithm>
#include <functional>
#include <string>

namespace weft {
namespace {

// The two files of a golden were written apart; that they agree shows that both are read right.
class GoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, MarginsAndTokensFollowFromTheStoredLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  const Golden golden = LoadGolden(dir);
  ASSERT_EQ(golden.prompts.size(), 4u);
  for (const auto& [name, prompt] : golden.prompts) {
    EXPECT_EQ("len" + std::to_string(prompt.ids.size()), name);
    ASSERT_EQ(prompt.greedy.size(), 48u);
    ASSERT_EQ(prompt.margins.size(), 48u);
    EXPECT_GT(*std::min_element(prompt.margins.begin(), prompt.margins.end()), 6e-3f);
    std::vector<float> logits = golden.Tensor("last_logits." + name).values;
    const auto best = std::max_element(logits.begin(), logits.end());
    EXPECT_EQ(best - logits.begin(), prompt.greedy[0]);
    std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
    EXPECT_NEAR(logits[0] - logits[1], prompt.margins[0], 1e-4);
  }
  const GoldenTensor& steps = golden.Tensor("step_logits.len7");
  ASSERT_EQ(steps.shape.size(), 2u);
  for (std::int64_t i = 0; i < steps.shape[0]; ++i) {
    const auto row = steps.values.begin() + i * steps.shape[1];
    EXPECT_EQ(std::max_element(row, row + steps.shape[1]) - row,
              golden.Prompt("len7").greedy[static_cast<std::size_t>(i)]);
  }
}

// The five checkpoints that a bare clone is tested with.
INSTANTIATE_TEST_SUITE_P(Committed, GoldenTest,
                         testing::Values("llama_gqa", "llama_mqa", "llama_odd", "llama3_rope",
                                         "deepseek_v2_lite"));

}  // namespace
}  // namespace weft
