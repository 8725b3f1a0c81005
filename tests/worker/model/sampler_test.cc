#include "worker/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The ids that min_p, top_k, then top_p leave, by sorting everything.
std::vector<std::int32_t> Candidates(const std::vector<float>& logits,
                                     const SamplingParams& params) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
  const float highest = logits[ids[0]];
  const auto weight = [&](std::int32_t id) -> long double {
    if (logits[id] == highest) return 1;
    return std::exp((static_cast<long double>(logits[id]) - highest) / params.temperature);
  };
  std::erase_if(ids, [&](std::int32_t id) { return weight(id) < params.min_p; });
  if (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < ids.size()) {
    ids.resize(params.top_k);
  }
  long double total = 0;
  for (std::int32_t id : ids) total += weight(id);
  long double reached = 0;
  for (std::size_t i = 0; i < ids.size() && params.top_p < 1; ++i) {
    reached += weight(ids[i]);
    if (reached >= params.top_p * total) ids.resize(i + 1);
  }
  return ids;
}

std::int32_t Draw(const std::vector<float>& logits, const SamplingParams& params,
                  std::int64_t position) {
  const std::vector<std::int32_t> ids = Candidates(logits, params);
  std::int32_t best = *std::min_element(ids.begin(), ids.end());
  float best_score = -kInf;
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(logits.size()); ++id) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) continue;
    const float score =
        logits[id] / params.temperature + kernels::GumbelNoise(params.seed, position, id);
    if (score > best_score) {
      best = id;
      best_score = score;
    }
  }
  return best;
}

enum Kind { kSmooth, kPeaked, kFlat, kTies, kMostlyMinusInf, kWithInf, kNumKinds };

std::vector<float> RandomLogits(std::mt19937& rng, int size, Kind kind) {
  std::normal_distribution<float> normal(0, kind == kPeaked ? 8 : kind == kFlat ? 0.01F : 2);
  std::vector<float> logits(size);
  for (float& logit : logits) {
    logit = normal(rng);
    if (kind == kTies) logit = std::round(logit);
    if (kind == kMostlyMinusInf && rng() % 8 != 0) logit = -kInf;
    if (kind == kWithInf && rng() % 16 == 0) logit = kInf;
  }
  return logits;
}

TEST(SamplerTest, EqualsBruteForce) {
  for (unsigned seed = 1; seed <= 6000; ++seed) {
    std::mt19937 rng(seed);
    const auto kind = static_cast<Kind>(seed % kNumKinds);
    const int size = std::vector{1, 2, 17, 320}[rng() % 4];
    const std::vector<float> logits = RandomLogits(rng, size, kind);
    const SamplingParams params{
        .temperature = std::vector{0.3F, 1.0F, 2.5F}[rng() % 3],
        .top_p = std::vector{1.0F, 0.999999F, 0.95F, 0.5F, 0.25F, 1e-6F}[rng() % 6],
        .top_k = std::vector{0, 1, 3, 40, 1000}[rng() % 5],
        .min_p = std::vector{0.0F, 0.0F, 1e-6F, 0.1F, 0.5F, 1.0F}[rng() % 6],
        .seed = rng()};
    Sampler sampler(size);
    ASSERT_EQ(sampler.Sample(logits, params, seed), Draw(logits, params, seed)) << fmt::format(
        "seed {} kind {} size {} temperature {} top_p {} top_k {} min_p {}", seed,
        static_cast<int>(kind), size, params.temperature, params.top_p, params.top_k, params.min_p);
  }
}

// The candidates themselves: over many positions every one of them is drawn, and no other.
TEST(SamplerTest, DrawsEveryCandidateAndNoOther) {
  const std::vector<float> logits = {1, 1, 0.5F, 1, 0.5F, 0, 0.5F, -kInf};
  Sampler sampler(8);
  const auto drawn = [&](const SamplingParams& params) {
    std::vector<bool> seen(8);
    for (int position = 0; position < 2000; ++position) {
      seen[sampler.Sample(logits, params, position)] = true;
    }
    std::vector<std::int32_t> ids;
    for (int id = 0; id < 8; ++id) {
      if (seen[id]) ids.push_back(id);
    }
    return ids;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(drawn({.top_k = 2}), (Ids{0, 1}));        // of the equal ones the lowest ids
  EXPECT_EQ(drawn({.top_k = 4}), (Ids{0, 1, 2, 3}));  // likewise
  EXPECT_EQ(drawn({.top_k = 8}), (Ids{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(drawn({.top_p = 0.999F}), (Ids{0, 1, 2, 3, 4, 5, 6}));
  // Probabilities 0.193 three times, 0.117 three times, 0.071.
  EXPECT_EQ(drawn({.top_p = 0.38F}), (Ids{0, 1}));
  EXPECT_EQ(drawn({.top_p = 0.5F}), (Ids{0, 1, 3}));
  EXPECT_EQ(drawn({.top_p = 0.66F}), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(drawn({.top_p = 0.2F}), (Ids{0, 1}));
  EXPECT_EQ(drawn({.top_p = 0.19F}), (Ids{0}));
  // Relative to the most probable: 1 three times, 0.607 three times, 0.368.
  EXPECT_EQ(drawn({.min_p = 0.3F}), (Ids{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(drawn({.min_p = 0.5F}), (Ids{0, 1, 2, 3, 4, 6}));
  EXPECT_EQ(drawn({.min_p = 1}), (Ids{0, 1, 3}));
  EXPECT_EQ(drawn({.temperature = 0.5F, .min_p = 0.3F}), (Ids{0, 1, 2, 3, 4, 6}));
  EXPECT_EQ(drawn({.top_p = 0.66F, .min_p = 1}), (Ids{0, 1}));  // of what min_p leaves
  // top_p counts within what top_k leaves: a third each.
  EXPECT_EQ(drawn({.top_p = 0.6F, .top_k = 3}), (Ids{0, 1}));
}

TEST(SamplerTest, KeepsOneCandidateAtLeast) {
  const std::vector<float> logits = {-1, 3, 2, 3};
  Sampler sampler(4);
  for (int position = 0; position < 200; ++position) {
    EXPECT_EQ(sampler.Sample(logits, {.top_k = 1}, position), 1);
    EXPECT_EQ(sampler.Sample(logits, {.top_p = 1e-9F}, position), 1);
  }
}

TEST(SamplerTest, RefusesWhatIsNotANumber) {
  Sampler sampler(4);
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, std::nanf(""), 0, 2}, {.top_k = 1}, 0), -1);
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, 0, 2, std::nanf("")}, {.top_p = 0.5F}, 0), -1);
}

TEST(SamplerTest, NothingButMinusInfinityGivesTheLowestId) {
  Sampler sampler(3);
  const std::vector<float> logits(3, -kInf);
  EXPECT_EQ(sampler.Sample(logits, {.top_k = 2}, 0), 0);
  EXPECT_EQ(sampler.Sample(logits, {.top_p = 0.5F}, 0), 0);
}

TEST(SamplerTest, BestIsTheHighestScoreThenTheLowestId) {
  using kernels::ArgmaxResult;
  const auto candidate = [](float score, std::int32_t id) {
    return ArgmaxResult{.score = score, .logsumexp = 0, .token_id = id};
  };
  // Two rows, three ranks: row 0 at 0, 2, 4.
  const std::vector<ArgmaxResult> all = {candidate(1, 5),  candidate(9, 3),  candidate(2, 17),
                                         candidate(9, 11), candidate(2, 25), candidate(8, 29)};
  EXPECT_EQ(Sampler::Best(all.data(), 3, 2), 17);
  EXPECT_EQ(Sampler::Best(all.data() + 1, 3, 2), 3);
  EXPECT_EQ(Sampler::Best(all.data(), 1, 2), 5);
  for (int r = 0; r < 3; ++r) {
    std::vector<ArgmaxResult> with_nan = all;
    with_nan[2 * r] = candidate(kInf, -1);
    EXPECT_EQ(Sampler::Best(with_nan.data(), 3, 2), -1);
    EXPECT_EQ(Sampler::Best(with_nan.data() + 1, 3, 2), 3);
  }
  // Every candidate may be -inf.
  const std::vector<ArgmaxResult> low = {candidate(-kInf, 0), candidate(-kInf, 10)};
  EXPECT_EQ(Sampler::Best(low.data(), 2, 1), 0);
}

}  // namespace
}  // namespace weft
