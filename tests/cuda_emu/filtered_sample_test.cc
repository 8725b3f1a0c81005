#include "kernels/cuda/filtered_sample.h"

#include "kernels/token_weight.h"
#include "tests/cuda_emu/cuda_test.h"
#include "worker/model/sampler.h"

namespace weft::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::int32_t vocab = 1;
  std::int32_t num_slices = 1;
  std::int32_t spare = 0;  // floats behind the longest slice
  std::vector<std::vector<float>> logits;
  std::vector<SamplingParams> params;
  std::vector<std::int64_t> position;

  std::int32_t Begin(std::int32_t slice) const { return slice * vocab / num_slices; }
  std::int32_t Stride() const { return (vocab + num_slices - 1) / num_slices + spare; }

  // As ranks gather them; nobody may look at what is between slices.
  std::vector<float> Gathered() const {
    const std::size_t rows = logits.size();
    std::vector<float> all(static_cast<std::size_t>(num_slices) * rows * Stride(), std::nanf(""));
    for (std::int32_t slice = 0; slice < num_slices; ++slice) {
      for (std::size_t row = 0; row < rows; ++row) {
        std::copy(logits[row].begin() + Begin(slice), logits[row].begin() + Begin(slice + 1),
                  all.begin() + static_cast<std::int64_t>(slice * rows + row) * Stride());
      }
    }
    return all;
  }
};

class FilteredSampleCudaTest : public CudaTest {
 protected:
  std::vector<FilteredToken> OnGpu(const Case& draw) {
    std::vector<FilteredRow> rows;
    for (std::size_t row = 0; row < draw.params.size(); ++row) {
      const SamplingParams& params = draw.params[row];
      rows.push_back({.seed = params.seed,
                      .position = draw.position[row],
                      .log_min_p = std::log(double{params.min_p}),
                      .temperature = params.temperature,
                      .top_p = params.top_p,
                      .top_k = params.top_k});
    }
    const DeviceArray<float> logits(draw.Gathered(), stream());
    const DeviceArray<FilteredRow> device_rows(rows, stream());
    const DeviceArray<FilteredToken> out(rows.size(), stream());
    EXPECT_TRUE(FilteredSample({.logits = logits.data(),
                                .rows = device_rows.data(),
                                .out = out.data(),
                                .logits_stride = draw.Stride(),
                                .num_slices = draw.num_slices,
                                .num_rows = static_cast<std::int32_t>(rows.size()),
                                .vocab_size = draw.vocab},
                               stream())
                    .ok());
    return out.Read();
  }

  void ExpectTheSamplers(const Case& draw) {
    const std::vector<FilteredToken> got = OnGpu(draw);
    Sampler sampler(draw.vocab);
    for (std::size_t row = 0; row < got.size(); ++row) {
      const SamplingParams& p = draw.params[row];
      const std::int32_t want = sampler.Sample(draw.logits[row], p, draw.position[row]);
      ASSERT_EQ(got[row].token_id, want)
          << "row " << row << " temperature " << p.temperature << " top_p " << p.top_p << " top_k "
          << p.top_k << " min_p " << p.min_p;
      if (want >= 0) {
        ASSERT_EQ(got[row].logit, draw.logits[row][want]) << "row " << row;
      }
    }
  }
};

enum class Kind { kSmooth, kPeaked, kFlat, kTies, kMostlyMinusInf, kWithInf, kNumKinds };

std::vector<float> RandomLogits(Rng& rng, std::int32_t size, Kind kind) {
  std::vector<float> logits = RandomFloats(rng, size,
                                           kind == Kind::kPeaked ? 20.0F
                                           : kind == Kind::kFlat ? 0.01F
                                                                 : 4.0F);
  for (float& logit : logits) {
    if (kind == Kind::kTies) logit = std::round(logit);  // with zeros of both signs
    if (kind == Kind::kMostlyMinusInf && RandomInt(rng, 0, 7) != 0) logit = -kInfinity;
    if (kind == Kind::kWithInf && RandomInt(rng, 0, 15) == 0) logit = kInfinity;
  }
  return logits;
}

TEST_P(FilteredSampleCudaTest, TokensAreTheSamplersOfTheCpu) {
  for (std::uint64_t seed = 0; seed < NumSeeds(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const auto one_of = [&rng](const auto& values) {
      return values[RandomInt(rng, 0, static_cast<std::int32_t>(std::size(values)) - 1)];
    };
    Case draw;
    draw.vocab = seed % 10 == 0 ? RandomInt(rng, 1000, 5000 / kShrink + 1000)
                                : one_of(std::vector{1, 2, 5, 100, 511, 700});
    draw.num_slices = one_of(std::vector{1, 2, 3});
    draw.spare = RandomInt(rng, 0, 3);
    for (std::int32_t row = RandomInt(rng, 1, 3); row > 0; --row) {
      draw.logits.push_back(RandomLogits(
          rng, draw.vocab,
          static_cast<Kind>(RandomInt(rng, 0, static_cast<int>(Kind::kNumKinds) - 1))));
      draw.params.push_back({.temperature = one_of(std::vector{0.3F, 1.0F, 2.5F}),
                             .top_p = one_of(std::vector{1.0F, 0.999999F, 0.95F, 0.5F, 1e-6F}),
                             .top_k = one_of(std::vector{0, 1, 3, 40, 1000}),
                             .min_p = one_of(std::vector{0.0F, 0.0F, 1e-6F, 0.1F, 1.0F}),
                             .seed = rng()});
      draw.position.push_back(static_cast<std::int64_t>(rng() >> 1));
    }
    ExpectTheSamplers(draw);
    if (HasFatalFailure()) return;
  }
}

// Where a filter ends among equal logits, the lowest ids stay: over positions each is drawn.
TEST_P(FilteredSampleCudaTest, OfEqualLogitsTheLowestIdsStay) {
  std::vector<float> logits(600, 1.0F);
  logits[7] = -0.0F;
  logits[9] = 0.0F;
  for (int position = 0; position < 8; ++position) {
    Case draw;
    draw.vocab = 600;
    draw.num_slices = 2;
    draw.logits.assign(3, logits);
    draw.params = {{.top_k = 5, .seed = 3}, {.top_k = 599, .seed = 3}, {.top_p = 0.01F, .seed = 3}};
    draw.position.assign(3, position);
    ExpectTheSamplers(draw);
    if (HasFatalFailure()) return;
  }
}

TEST_P(FilteredSampleCudaTest, NothingButMinusInfinityAndNaNsAreTheCpus) {
  for (const std::int32_t at : {0, 299, 300, 599}) {
    for (const float value : {std::nanf(""), -kInfinity, kInfinity, 3.0F}) {
      Case draw;
      draw.vocab = 600;
      draw.num_slices = 2;
      draw.logits.assign(2, std::vector<float>(600, -kInfinity));
      draw.logits[0][at] = value;
      draw.params = {{.top_k = 2, .seed = 1}, {.top_p = 0.5F, .seed = 2}};
      draw.position = {5, 6};
      ExpectTheSamplers(draw);
      if (HasFatalFailure()) return;
    }
  }
}

WEFT_IN_EVERY_ORDER(FilteredSampleCudaTest);

TEST(TokenWeightTest, IsTheExponentialToNearest) {
  Rng rng(5);
  constexpr auto kOne = static_cast<long double>(std::uint64_t{1} << kTokenWeightBits);
  for (int i = 0; i < 100'000; ++i) {
    const float temperature = static_cast<float>(RandomInt(rng, 1, 40)) / 10.0F;
    const float highest = static_cast<float>(RandomInt(rng, -1000, 1000)) / 37.0F;
    const float logit = highest - static_cast<float>(RandomInt(rng, 0, 1 << 20)) / 4096.0F /
                                      static_cast<float>(RandomInt(rng, 1, 1000));
    const long double want =
        kOne * std::exp((static_cast<long double>(logit) - highest) / temperature);
    ASSERT_NEAR(static_cast<double>(TokenWeight(logit, highest, temperature) - want), 0.0, 0.51)
        << logit << " " << highest << " " << temperature;
  }
  EXPECT_EQ(TokenWeight(-kInfinity, 0.0F, 1.0F), 0U);
  EXPECT_EQ(TokenWeight(1.0F, kInfinity, 1.0F), 0U);
  EXPECT_EQ(TokenWeight(kInfinity, kInfinity, 1.0F), std::uint64_t{1} << kTokenWeightBits);
  EXPECT_EQ(TokenWeight(0.0F, 3e38F, 1e-38F), 0U);
}

}  // namespace
}  // namespace weft::kernels::cuda
