#include "kernels/gumbel_argmax.h"

#include <limits>

#include "kernels/cpu/philox.h"
#include "tests/kernels/kernel_test.h"

namespace weft::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The known answers of Random123's kat_vectors for philox4x32 with 10 rounds.
TEST(PhiloxTest, MatchesThePublishedVectors) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(Philox4x32({0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}, {0xFFFFFFFF, 0xFFFFFFFF}),
            (Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(Philox4x32({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}),
            (Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

double NoiseInDoubles(std::uint64_t seed, std::int64_t position, std::int32_t token) {
  const auto id = static_cast<std::uint32_t>(token);
  const auto words = Philox4x32(
      {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), id / 4, 0},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return -std::log(-std::log((words[id % 4] + 0.5) * 0x1p-32));
}

struct Row {
  float temperature = 0.0F;
  std::uint64_t seed = 0;
  std::int64_t position = 0;
};

std::vector<ArgmaxResult> Draw(const std::vector<float>& logits, std::int64_t stride,
                               std::int32_t vocab, std::int32_t first_token,
                               const std::vector<Row>& rows, CpuStream& stream) {
  std::vector<float> temperature;
  std::vector<std::uint64_t> seed;
  std::vector<std::int64_t> position;
  for (const Row& row : rows) {
    temperature.push_back(row.temperature);
    seed.push_back(row.seed);
    position.push_back(row.position);
  }
  std::vector<ArgmaxResult> out(rows.size());
  EXPECT_TRUE(GumbelArgmax({.logits = logits.data(),
                            .temperature = temperature.data(),
                            .seed = seed.data(),
                            .position = position.data(),
                            .out = out.data(),
                            .logits_stride = stride,
                            .num_rows = static_cast<std::int32_t>(rows.size()),
                            .vocab_size = vocab,
                            .first_token_id = first_token},
                           stream)
                  .ok());
  return out;
}

using GumbelArgmaxTest = KernelTest;

TEST_P(GumbelArgmaxTest, NoiseIsExactOverTheWholeRange) {
  float lowest = kInfinity;
  float highest = -kInfinity;
  for (std::int32_t token = 0; token < static_cast<std::int32_t>(NumSeeds(300'000)); ++token) {
    const float noise = GumbelNoise(0x123456789ABCDEF0, std::int64_t{5} << 33, token);
    const double want = NoiseInDoubles(0x123456789ABCDEF0, std::int64_t{5} << 33, token);
    ASSERT_NEAR(noise, want, 5e-7 * std::max(1.0, std::abs(want))) << "token " << token;
    lowest = std::min(lowest, noise);
    highest = std::max(highest, noise);
  }
  EXPECT_LT(lowest, -2.2F);
  EXPECT_GT(highest, 9.5F);
}

TEST_P(GumbelArgmaxTest, NoiseIsTheSameOnEveryTarget) {
  std::vector<float> noise;
  for (std::int32_t token = 0; token < 20'000; ++token) noise.push_back(GumbelNoise(7, 3, token));
  ASSERT_TRUE(ForceCpuTarget("scalar").ok());
  for (std::int32_t token = 0; token < 20'000; ++token) {
    ASSERT_EQ(noise[token], GumbelNoise(7, 3, token)) << "token " << token;
  }
}

TEST_P(GumbelArgmaxTest, MatchesBruteForce) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t vocab = RandomInt(rng, 1, seed % 4 == 0 ? 60'000 : 3000);
    const std::int64_t stride = vocab + RandomInt(rng, 0, 9);
    const std::int32_t first_token = RandomInt(rng, 0, 100'000);
    std::vector<Row> rows(RandomInt(rng, 0, 12));
    for (Row& row : rows) {
      row = {RandomInt(rng, 0, 2) == 0 ? 0.0F : static_cast<float>(RandomInt(rng, 1, 30)) / 10.0F,
             rng(), static_cast<std::int64_t>(rng() >> 1)};
    }
    std::vector<float> logits =
        RandomFloats(rng, static_cast<std::int64_t>(rows.size()) * stride, 4.0F);
    // Coarse logits have ties: the lowest id must win.
    for (float& logit : logits) logit = std::round(logit * 2.0F) / 2.0F;
    const std::vector<ArgmaxResult> results =
        Draw(logits, stride, vocab, first_token, rows, stream);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const float* row_logits = logits.data() + row * stride;
      ArgmaxResult want{-kInfinity, 0.0F, -1};
      double sum = 0.0;
      for (std::int32_t i = 0; i < vocab; ++i) {
        const float noise = rows[row].temperature == 0.0F
                                ? 0.0F
                                : GumbelNoise(rows[row].seed, rows[row].position, first_token + i);
        const float score = rows[row].temperature == 0.0F
                                ? row_logits[i]
                                : row_logits[i] / rows[row].temperature + noise;
        sum += std::exp(double{row_logits[i]});
        if (score > want.score) want = {score, 0.0F, first_token + i};
      }
      ASSERT_EQ(results[row].token_id, want.token_id) << "row " << row;
      ASSERT_EQ(results[row].score, want.score);
      ASSERT_NEAR(results[row].logsumexp, std::log(sum),
                  1e-5 * std::max(1.0, std::abs(std::log(sum))));
    }
  }
}

// Every rank draws from its slice; the best of the slices is the draw from the whole.
TEST_P(GumbelArgmaxTest, SlicesAgreeWithTheWholeWhateverTheThreads) {
  CpuStream one(1);
  CpuStream three(3);
  Rng rng(2);
  constexpr std::int32_t kVocab = 5003;
  for (int round = 0; round < 50; ++round) {
    const std::vector<float> logits = RandomFloats(rng, kVocab, 2.0F);
    const std::vector<Row> rows = {{1.0F, rng(), round}};
    const ArgmaxResult whole = Draw(logits, kVocab, kVocab, 0, rows, one)[0];
    const ArgmaxResult threaded = Draw(logits, kVocab, kVocab, 0, rows, three)[0];
    ASSERT_EQ(std::memcmp(&whole, &threaded, sizeof(whole)), 0);
    ArgmaxResult best{-kInfinity, 0.0F, -1};
    for (int rank = 0; rank < 3; ++rank) {
      const std::int32_t begin = kVocab * rank / 3;
      const std::int32_t end = kVocab * (rank + 1) / 3;
      const std::vector<float> slice(logits.begin() + begin, logits.begin() + end);
      const ArgmaxResult result = Draw(slice, kVocab, end - begin, begin, rows, three)[0];
      if (result.score > best.score) best = result;
    }
    ASSERT_EQ(best.token_id, whole.token_id);
    ASSERT_EQ(best.score, whole.score);
  }
}

TEST_P(GumbelArgmaxTest, NaNIsReported) {
  CpuStream stream(2);
  for (const std::int32_t at : {0, 1, 1500, 2004}) {
    std::vector<float> logits(2 * 2005, 0.5F);
    logits[2005 + at] = std::nanf("");
    const auto results =
        Draw(logits, 2005, 2005, 10, {{0.0F}, {at % 2 == 0 ? 1.0F : 0.0F, 3, 4}}, stream);
    EXPECT_EQ(results[0].token_id, 10);
    EXPECT_EQ(results[1].token_id, -1);
    EXPECT_EQ(results[1].score, kInfinity);
  }
}

TEST_P(GumbelArgmaxTest, InfiniteLogits) {
  CpuStream stream(1);
  std::vector<float> logits(100, -kInfinity);
  ArgmaxResult result = Draw(logits, 100, 100, 5, {{0.0F}}, stream)[0];
  EXPECT_EQ(result.token_id, 5);
  EXPECT_EQ(result.logsumexp, -kInfinity);
  logits[42] = 1.5F;
  for (const float temperature : {0.0F, 1.0F}) {
    result = Draw(logits, 100, 100, 5, {{temperature, 9, 9}}, stream)[0];
    EXPECT_EQ(result.token_id, 47);
    EXPECT_FLOAT_EQ(result.logsumexp, 1.5F);
  }
  logits[50] = kInfinity;
  result = Draw(logits, 100, 100, 5, {{0.0F}}, stream)[0];
  EXPECT_EQ(result.token_id, 55);
  EXPECT_EQ(result.logsumexp, kInfinity);
}

// Pearson's chi-square of drawn tokens against softmax(logits / temperature), over positions and
// over seeds.
TEST_P(GumbelArgmaxTest, DrawsFollowTheSoftmax) {
  CpuStream stream(2);
  constexpr std::int32_t kVocab = 21;
  constexpr int kDraws = NumSeeds(20'000);
  Rng rng(77);
  const std::vector<float> logits = RandomFloats(rng, kVocab, 1.0F);
  for (const float temperature : {0.7F, 1.0F, 2.5F}) {
    std::vector<double> p;
    double sum = 0.0;
    for (const float logit : logits) sum += p.emplace_back(std::exp(double{logit} / temperature));
    for (const bool over_seeds : {false, true}) {
      std::vector<Row> rows;
      for (int i = 0; i < kDraws; ++i) {
        rows.push_back(
            {temperature, over_seeds ? static_cast<std::uint64_t>(i) : 99U, over_seeds ? 4 : i});
      }
      std::vector<int> counts(kVocab);
      for (const ArgmaxResult& result : Draw(logits, 0, kVocab, 0, rows, stream))
        ++counts[result.token_id];
      double chi_square = 0.0;
      for (std::int32_t i = 0; i < kVocab; ++i) {
        const double expected = p[i] / sum * kDraws;
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
      }
      // 20 degrees of freedom: 45.3 is exceeded once in a thousand times.
      EXPECT_LT(chi_square, 45.3) << "temperature " << temperature << ", over seeds " << over_seeds;
    }
  }
}

WEFT_FOR_EACH_TARGET(GumbelArgmaxTest);

}  // namespace
}  // namespace weft::kernels
