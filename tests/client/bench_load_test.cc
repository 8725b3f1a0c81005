#include "client/bench_load.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(RandomPromptsTest, HaveTheLengthsAskedFor) {
  const auto requests = MakeRandomPrompts(
      {.num_prompts = 5, .input_len = 7, .output_len = 3, .vocab_size = 20, .seed = 1});
  ASSERT_EQ(requests.size(), 5U);
  for (const v1::GenerateRequest& request : requests) {
    EXPECT_EQ(request.token_ids().ids_size(), 7);
    EXPECT_EQ(request.sampling().max_tokens(), 3);
    EXPECT_TRUE(request.sampling().ignore_eos());
    for (const std::int32_t id : request.token_ids().ids()) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, 20);
    }
  }
}

TEST(RandomPromptsTest, LengthsVaryOverTheWholeRange) {
  const auto requests = MakeRandomPrompts(
      {.num_prompts = 2000, .input_len = 10, .output_len = 4, .range_ratio = 0.5, .seed = 2});
  const auto [shortest, longest] =
      std::minmax_element(requests.begin(), requests.end(), [](const auto& a, const auto& b) {
        return a.token_ids().ids_size() < b.token_ids().ids_size();
      });
  EXPECT_EQ(shortest->token_ids().ids_size(), 5);
  EXPECT_EQ(longest->token_ids().ids_size(), 15);
  for (const auto& request : requests) {
    EXPECT_GE(request.sampling().max_tokens(), 2);
    EXPECT_LE(request.sampling().max_tokens(), 6);
  }
}

TEST(RandomPromptsTest, AreTheSameForTheSameSeed) {
  RandomPrompts options = {.num_prompts = 3, .input_len = 9, .output_len = 9, .range_ratio = 0.9};
  const auto bytes = [&] {
    std::string all;
    for (const auto& request : MakeRandomPrompts(options)) all += request.SerializeAsString();
    return all;
  };
  const std::string first = bytes();
  EXPECT_EQ(bytes(), first);
  options.seed = 1;
  EXPECT_NE(bytes(), first);
}

TEST(ArrivalsTest, WithoutARateAllComeAtOnce) {
  EXPECT_TRUE(MakeArrivals(9, std::nullopt, 1, 0).empty());
}

// Mean 1 / rate; coefficient of variation 1 / sqrt(burstiness).
TEST(ArrivalsTest, GapsHaveTheMeanAndTheSpreadOfTheirGammaDistribution) {
  constexpr int kNum = 20000;
  for (const double burstiness : {0.25, 1.0, 4.0}) {
    const auto arrivals = MakeArrivals(kNum + 1, 50, burstiness, 3);
    ASSERT_TRUE(std::is_sorted(arrivals.begin(), arrivals.end()));
    double sum = 0, squares = 0;
    for (int i = 0; i < kNum; ++i) {
      const double gap = absl::ToDoubleSeconds(arrivals[i + 1] - arrivals[i]);
      sum += gap;
      squares += gap * gap;
    }
    const double mean = sum / kNum;
    const double deviation = std::sqrt(squares / kNum - mean * mean);
    EXPECT_NEAR(mean * 50, 1, 0.05) << burstiness;
    EXPECT_NEAR(deviation / mean, 1 / std::sqrt(burstiness), 0.06) << burstiness;
  }
}

}  // namespace
}  // namespace weft
