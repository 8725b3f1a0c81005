#include "kernels/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/kernels/kernel_test.h"
#include "tests/kernels/moe_cases.h"

namespace weft::kernels {
namespace {

struct Routing {
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
};

Routing Route(RouteRowsParams params, CpuStream& stream) {
  Routing routing;
  const std::size_t count = static_cast<std::size_t>(params.num_rows) * params.top_k;
  routing.experts.resize(count);
  routing.weights.resize(count);
  std::vector<float> scratch(static_cast<std::size_t>(params.num_rows) * 2 * params.num_experts);
  params.experts = routing.experts.data();
  params.weights = routing.weights.data();
  params.scratch = scratch.data();
  EXPECT_TRUE(RouteRows(params, stream).ok());
  return routing;
}

// The same by sorting, in doubles, of one row.
std::vector<std::pair<int, double>> Reference(const RouteRowsParams& p, const float* logits) {
  std::vector<double> scores(p.num_experts);
  double sum = 0;
  for (int e = 0; e < p.num_experts; ++e) {
    scores[e] = p.score == ExpertScore::kSigmoid ? 1 / (1 + std::exp(-double{logits[e]}))
                                                 : std::exp(double{logits[e]});
    sum += scores[e];
  }
  if (p.score == ExpertScore::kSoftmax) {
    for (double& score : scores) score /= sum;
  }
  std::vector<double> ranks = scores;
  for (int e = 0; e < p.num_experts && p.bias != nullptr; ++e) ranks[e] += p.bias[e];
  const int size = p.num_experts / p.num_groups;
  std::vector<std::pair<double, int>> groups;  // minus score, group
  for (int g = 0; g < p.num_groups; ++g) {
    std::vector<double> of_group(ranks.begin() + g * size, ranks.begin() + (g + 1) * size);
    std::sort(of_group.rbegin(), of_group.rend());
    const bool two = p.group_score == GroupScore::kSumOfBestTwo && size > 1;
    groups.emplace_back(-(of_group[0] + (two ? of_group[1] : 0)), g);
  }
  std::sort(groups.begin(), groups.end());
  const int kept = p.group_score == GroupScore::kNone ? p.num_groups : p.top_groups;
  std::vector<std::pair<double, int>> order;
  for (int i = 0; i < kept; ++i) {
    for (int e = groups[i].second * size; e < (groups[i].second + 1) * size; ++e) {
      order.emplace_back(-ranks[e], e);
    }
  }
  std::sort(order.begin(), order.end());
  std::vector<std::pair<int, double>> chosen;
  double total = 0;
  for (int j = 0; j < p.top_k; ++j) total += scores[order[j].second];
  for (int j = 0; j < p.top_k; ++j) {
    const double weight = scores[order[j].second] / (p.normalize ? total + 1e-20 : 1.0);
    chosen.emplace_back(order[j].second, weight * p.scale);
  }
  return chosen;
}

TEST(RouteRowsTest, ChoosesAndWeighsAsSortingInDoublesDoes) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(200); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    RouteRowsParams params = DrawRouting(rng, seed, /*max_rows=*/30, /*max_group=*/9);
    const auto logits = RandomFloats(rng, std::int64_t{params.num_rows} * params.num_experts);
    const auto bias = RandomFloats(rng, params.num_experts, 0.3F);
    params.logits = logits.data();
    params.bias = seed / 12 % 2 == 0 ? bias.data() : nullptr;
    const Routing routing = Route(params, stream);
    for (std::int32_t row = 0; row < params.num_rows; ++row) {
      const auto want = Reference(params, logits.data() + row * params.num_experts);
      for (std::int32_t j = 0; j < params.top_k; ++j) {
        const std::size_t at = static_cast<std::size_t>(row) * params.top_k + j;
        ASSERT_EQ(routing.experts[at], want[j].first) << "row " << row << ", choice " << j;
        ASSERT_NEAR(routing.weights[at], want[j].second, 2e-6 * params.scale);
      }
    }
  }
}

TEST(RouteRowsTest, EqualScoresGoToTheLowestIds) {
  CpuStream stream(1);
  const std::vector<float> logits(12, 0.5F);
  const RouteRowsParams params = {.logits = logits.data(),
                                  .num_rows = 1,
                                  .num_experts = 12,
                                  .top_k = 5,
                                  .group_score = GroupScore::kBest,
                                  .num_groups = 4,
                                  .top_groups = 2,
                                  .scale = 1.0F};
  EXPECT_EQ(Route(params, stream).experts, (std::vector<std::int32_t>{0, 1, 2, 3, 4}));
}

// Buffers hold what different experts need.
TEST(RouteRowsTest, NeverChoosesAnExpertTwiceEvenOfValuesThatAreNoNumbers) {
  CpuStream stream(1);
  for (const float value : {std::nanf(""), -INFINITY, INFINITY}) {
    const std::vector<float> logits(6, value);
    Routing routing = Route({.logits = logits.data(),
                             .num_rows = 1,
                             .num_experts = 6,
                             .top_k = 4,
                             .num_groups = 1,
                             .top_groups = 1,
                             .scale = 1.0F},
                            stream);
    std::sort(routing.experts.begin(), routing.experts.end());
    EXPECT_EQ(std::unique(routing.experts.begin(), routing.experts.end()), routing.experts.end());
    EXPECT_TRUE(routing.experts[0] >= 0 && routing.experts[3] < 6);
  }
}

TEST(SortByExpertTest, EveryRowOfALocalExpertHasOnePlaceInOrder) {
  CpuStream stream(1);
  for (std::uint64_t seed = 0; seed < NumSeeds(100); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 0, 40);
    const std::int32_t num_experts = RandomInt(rng, 1, 20);
    const std::int32_t top_k = RandomInt(rng, 1, num_experts);
    const std::int32_t first = RandomInt(rng, 0, num_experts - 1);
    const std::int32_t num_local = RandomInt(rng, 1, num_experts - first);
    std::vector<std::int32_t> experts;
    for (std::int32_t row = 0; row < rows; ++row) {
      std::vector<std::int32_t> all(num_experts);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), rng);
      experts.insert(experts.end(), all.begin(), all.begin() + top_k);
    }
    std::vector<std::int32_t> row_of(experts.size(), -7);
    std::vector<std::int32_t> place_of(experts.size(), -7);
    std::vector<std::int32_t> begin(num_local + 1, -7);
    ASSERT_TRUE(SortByExpert({.experts = experts.data(),
                              .row_of = row_of.data(),
                              .place_of = place_of.data(),
                              .expert_begin = begin.data(),
                              .num_rows = rows,
                              .top_k = top_k,
                              .first_expert = first,
                              .num_local = num_local},
                             stream)
                    .ok());
    ASSERT_EQ(begin[0], 0);
    std::int32_t at = 0;
    for (std::int32_t e = 0; e < num_local; ++e) {
      for (std::size_t i = 0; i < experts.size(); ++i) {
        if (experts[i] != first + e) continue;
        ASSERT_EQ(place_of[i], at);
        ASSERT_EQ(row_of[at], static_cast<std::int32_t>(i) / top_k);
        ++at;
      }
      ASSERT_EQ(begin[e + 1], at);
    }
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const bool local = experts[i] >= first && experts[i] < first + num_local;
      ASSERT_EQ(place_of[i] == -1, !local);
    }
  }
}

TEST(CombineExpertsTest, AddsWhatIsHereToTheResidual) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(50); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 0, 40);
    const std::int32_t top_k = RandomInt(rng, 1, 5);
    const std::int32_t size = RandomInt(rng, 1, 70);
    const std::int32_t routed = RandomInt(rng, 1, 30);
    const auto in = RandomFloats(rng, std::int64_t{routed} * size);
    const auto weights = RandomFloats(rng, std::int64_t{rows} * top_k);
    const auto residual = RandomFloats(rng, std::int64_t{rows} * size);
    std::vector<std::int32_t> place_of;
    for (std::int32_t i = 0; i < rows * top_k; ++i) {
      place_of.push_back(RandomInt(rng, -1, routed - 1));
    }
    std::vector<float> out = residual;  // in place
    const bool add = seed % 3 > 0;
    ASSERT_TRUE(CombineExperts({.in = in.data(),
                                .place_of = place_of.data(),
                                .weights = weights.data(),
                                .residual = !add            ? nullptr
                                            : seed % 3 == 1 ? out.data()
                                                            : residual.data(),
                                .out = out.data(),
                                .num_rows = rows,
                                .top_k = top_k,
                                .size = size},
                               stream)
                    .ok());
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int32_t i = 0; i < size; ++i) {
        double want = add ? residual[row * size + i] : 0.0;
        for (std::int32_t j = row * top_k; j < (row + 1) * top_k; ++j) {
          if (place_of[j] >= 0) want += double{weights[j]} * in[place_of[j] * size + i];
        }
        ASSERT_NEAR(out[row * size + i], want, 2e-5);
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels
