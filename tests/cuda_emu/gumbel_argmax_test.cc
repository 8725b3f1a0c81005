#include "kernels/gumbel_argmax.h"

#include "kernels/cuda/gumbel_argmax.h"
#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::int32_t vocab = 1;
  std::int64_t stride = 1;
  std::int32_t first_token = 0;
  std::vector<float> logits;
  std::vector<float> temperature;
  std::vector<std::uint64_t> seed;
  std::vector<std::int64_t> position;

  GumbelArgmaxParams Params() const {
    return {.logits = logits.data(),
            .temperature = temperature.data(),
            .seed = seed.data(),
            .position = position.data(),
            .out = nullptr,
            .logits_stride = stride,
            .num_rows = static_cast<std::int32_t>(temperature.size()),
            .vocab_size = vocab,
            .first_token_id = first_token};
  }
};

class GumbelArgmaxCudaTest : public CudaTest {
 protected:
  std::vector<ArgmaxResult> OnCpu(const Case& draw) {
    std::vector<ArgmaxResult> out(draw.temperature.size());
    GumbelArgmaxParams params = draw.Params();
    params.out = out.data();
    EXPECT_TRUE(kernels::GumbelArgmax(params, cpu).ok());
    return out;
  }

  std::vector<ArgmaxResult> OnGpu(const Case& draw) {
    const DeviceArray<float> logits(draw.logits, stream());
    const DeviceArray<float> temperature(draw.temperature, stream());
    const DeviceArray<std::uint64_t> seed(draw.seed, stream());
    const DeviceArray<std::int64_t> position(draw.position, stream());
    const DeviceArray<ArgmaxResult> out(draw.temperature.size(), stream());
    GumbelArgmaxParams params = draw.Params();
    const DeviceArray<std::byte> workspace(
        static_cast<std::size_t>(GumbelArgmaxWorkspaceBytes(params.num_rows)), stream());
    params.logits = logits.data();
    params.temperature = temperature.data();
    params.seed = seed.data();
    params.position = position.data();
    params.out = out.data();
    EXPECT_TRUE(GumbelArgmax(params, workspace.data(), stream()).ok());
    return out.Read();
  }

  void ExpectTheCpus(const Case& draw) {
    const auto want = OnCpu(draw);
    const auto got = OnGpu(draw);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t row = 0; row < got.size(); ++row) {
      ASSERT_EQ(got[row].token_id, want[row].token_id) << "row " << row;
      ASSERT_EQ(got[row].score, want[row].score) << "row " << row;  // the same bits
      if (std::isnan(want[row].logsumexp)) {
        ASSERT_TRUE(std::isnan(got[row].logsumexp));
      } else if (std::isinf(want[row].logsumexp)) {
        ASSERT_EQ(got[row].logsumexp, want[row].logsumexp);
      } else {
        ASSERT_NEAR(got[row].logsumexp, want[row].logsumexp,
                    1e-5 * std::max(1.0F, std::abs(want[row].logsumexp)));
      }
    }
  }
};

TEST_P(GumbelArgmaxCudaTest, TokensAndScoresAreTheCpusBitForBit) {
  for (std::uint64_t seed = 0; seed < NumSeeds(25); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    Case draw;
    draw.vocab = RandomInt(rng, 1, seed % 5 == 0 ? 40'000 / kShrink : 2500);
    draw.stride = draw.vocab + RandomInt(rng, 0, 9);
    draw.first_token = RandomInt(rng, 0, 100'000);
    for (std::int32_t row = RandomInt(rng, 0, 4); row > 0; --row) {
      draw.temperature.push_back(
          RandomInt(rng, 0, 2) == 0 ? 0.0F : static_cast<float>(RandomInt(rng, 1, 30)) / 10.0F);
      draw.seed.push_back(rng());
      draw.position.push_back(static_cast<std::int64_t>(rng() >> 1));
    }
    draw.logits =
        RandomFloats(rng, static_cast<std::int64_t>(draw.temperature.size()) * draw.stride, 4.0F);
    // Coarse logits have ties: the lowest id must win.
    for (float& logit : draw.logits) logit = std::round(logit * 2.0F) / 2.0F;
    ExpectTheCpus(draw);
    if (HasFatalFailure()) return;
  }
}

TEST_P(GumbelArgmaxCudaTest, InfinitiesAndNaNsAreTheCpus) {
  for (const std::int32_t at : {0, 1, 1500, 2004}) {
    for (const float value : {std::nanf(""), kInfinity, -kInfinity}) {
      for (const float rest : {0.5F, -kInfinity}) {
        Case draw;
        draw.vocab = 2005;
        draw.stride = 2005;
        draw.first_token = 10;
        draw.temperature = {0.0F, 1.0F};
        draw.seed = {3, 4};
        draw.position = {5, 6};
        draw.logits.assign(2 * 2005, rest);
        draw.logits[at] = draw.logits[2005 + at] = value;
        ExpectTheCpus(draw);
        if (HasFatalFailure()) return;
      }
    }
  }
}

WEFT_IN_EVERY_ORDER(GumbelArgmaxCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
