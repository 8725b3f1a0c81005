#include "kernels/moe.h"

#include <algorithm>

#include "kernels/cuda/moe.h"
#include "tests/cuda_emu/cuda_test.h"
#include "tests/kernels/moe_cases.h"

namespace weft::kernels::cuda {
namespace {

using MoeCudaTest = CudaTest;

TEST_P(MoeCudaTest, RoutesAsTheCpuDoes) {
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    RouteRowsParams params =
        DrawRouting(rng, seed, /*max_rows=*/8, /*max_group=*/seed % 4 == 0 ? 40 : 9);
    auto logits = RandomFloats(rng, std::int64_t{params.num_rows} * params.num_experts);
    // Ties, but not where the CPU's and the GPU's rounding would settle them differently.
    for (std::size_t i = 0; seed % 3 == 0 && i < logits.size(); ++i)
      logits[i] = std::round(logits[i] * 4.0F) / 4.0F;
    const auto bias = RandomFloats(rng, params.num_experts, 0.3F);
    const std::size_t count = static_cast<std::size_t>(params.num_rows) * params.top_k;
    std::vector<std::int32_t> experts(count);
    std::vector<float> weights(count);
    std::vector<float> scratch(static_cast<std::size_t>(params.num_rows) * 2 * params.num_experts);
    params.logits = logits.data();
    params.bias = seed / 12 % 2 == 0 ? bias.data() : nullptr;
    params.experts = experts.data();
    params.weights = weights.data();
    params.scratch = scratch.data();
    ASSERT_TRUE(kernels::RouteRows(params, cpu).ok());

    const DeviceArray<float> device_logits(logits, stream());
    const DeviceArray<float> device_bias(bias, stream());
    const DeviceArray<std::int32_t> device_experts(count, stream());
    const DeviceArray<float> device_weights(count, stream());
    params.logits = device_logits.data();
    params.bias = params.bias != nullptr ? device_bias.data() : nullptr;
    params.experts = device_experts.data();
    params.weights = device_weights.data();
    params.scratch = nullptr;
    ASSERT_TRUE(RouteRows(params, stream()).ok());
    ASSERT_EQ(device_experts.Read(), experts);
    ExpectClose<float>(device_weights.Read(), weights, 2e-6);
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeCudaTest, NeverChoosesAnExpertTwiceEvenOfValuesThatAreNoNumbers) {
  for (const float value : {std::nanf(""), -INFINITY, INFINITY}) {
    const DeviceArray<float> logits(std::vector<float>(70, value), stream());
    const DeviceArray<std::int32_t> experts(40, stream());
    const DeviceArray<float> weights(40, stream());
    ASSERT_TRUE(RouteRows({.logits = logits.data(),
                           .bias = nullptr,
                           .experts = experts.data(),
                           .weights = weights.data(),
                           .scratch = nullptr,
                           .num_rows = 1,
                           .num_experts = 70,
                           .top_k = 40,
                           .num_groups = 1,
                           .top_groups = 1,
                           .scale = 1.0F},
                          stream())
                    .ok());
    auto chosen = experts.Read();
    std::sort(chosen.begin(), chosen.end());
    EXPECT_GE(chosen.front(), 0);
    EXPECT_LT(chosen.back(), 70);
    EXPECT_EQ(std::unique(chosen.begin(), chosen.end()), chosen.end()) << value;
  }
}

TEST_P(MoeCudaTest, RefusesMoreExpertsThanFit) {
  const absl::Status status =
      RouteRows({.num_rows = 1, .num_experts = kMaxDeviceExperts + 1}, stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("1025"), std::string::npos) << status;
}

TEST_P(MoeCudaTest, SortsAsTheCpuDoes) {
  for (std::uint64_t seed = 0; seed < NumSeeds(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t num_experts = RandomInt(rng, 1, 12);
    SortByExpertParams params = {.num_rows = RandomInt(rng, 0, seed % 4 == 0 ? 200 : 20),
                                 .top_k = RandomInt(rng, 1, std::min(4, num_experts))};
    params.first_expert = RandomInt(rng, 0, num_experts - 1);
    params.num_local = RandomInt(rng, 0, num_experts - params.first_expert);
    const std::size_t count = static_cast<std::size_t>(params.num_rows) * params.top_k;
    std::vector<std::int32_t> experts;
    for (std::int32_t row = 0; row < params.num_rows; ++row) {
      std::vector<std::int32_t> all(num_experts);
      for (std::int32_t e = 0; e < num_experts; ++e) all[e] = e;
      std::shuffle(all.begin(), all.end(), rng);
      experts.insert(experts.end(), all.begin(), all.begin() + params.top_k);
    }
    std::vector<std::int32_t> row_of(count, -9);
    std::vector<std::int32_t> place_of(count, -9);
    std::vector<std::int32_t> begin(params.num_local + 1, -9);
    const DeviceArray<std::int32_t> device_experts(experts, stream());
    const DeviceArray<std::int32_t> device_row_of(row_of, stream());
    const DeviceArray<std::int32_t> device_place_of(place_of, stream());
    const DeviceArray<std::int32_t> device_begin(begin, stream());
    params.experts = experts.data();
    params.row_of = row_of.data();
    params.place_of = place_of.data();
    params.expert_begin = begin.data();
    ASSERT_TRUE(kernels::SortByExpert(params, cpu).ok());
    params.experts = device_experts.data();
    params.row_of = device_row_of.data();
    params.place_of = device_place_of.data();
    params.expert_begin = device_begin.data();
    ASSERT_TRUE(SortByExpert(params, stream()).ok());
    ASSERT_EQ(device_begin.Read(), begin);
    ASSERT_EQ(device_place_of.Read(), place_of);
    ASSERT_EQ(device_row_of.Read(), row_of);
  }
}

TEST_P(MoeCudaTest, CombinesAsTheCpuDoes) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(10); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      const std::int32_t rows = RandomInt(rng, 0, 6);
      const std::int32_t top_k = RandomInt(rng, 1, 5);
      const std::int32_t size = seed % 2 == 0 ? 8 * RandomInt(rng, 1, 40) : RandomInt(rng, 1, 300);
      const std::int32_t routed = RandomInt(rng, 1, 20);
      const auto in = RoundedFloats<T>(RandomFloats(rng, std::int64_t{routed} * size));
      const auto residual = RoundedFloats<T>(RandomFloats(rng, std::int64_t{rows} * size));
      const auto weights = RandomFloats(rng, std::int64_t{rows} * top_k);
      std::vector<std::int32_t> place_of;
      for (std::size_t i = 0; i < weights.size(); ++i)
        place_of.push_back(RandomInt(rng, -1, routed - 1));
      const bool adds = seed % 3 != 0;
      std::vector<float> want = residual;
      ASSERT_TRUE(kernels::CombineExperts({.in = in.data(),
                                           .place_of = place_of.data(),
                                           .weights = weights.data(),
                                           .residual = adds ? want.data() : nullptr,
                                           .out = want.data(),
                                           .num_rows = rows,
                                           .top_k = top_k,
                                           .size = size},
                                          cpu)
                      .ok());
      const DeviceArray<T> device_in(Stored<T>(in), stream());
      const DeviceArray<T> out(Stored<T>(residual), stream());
      const DeviceArray<float> device_weights(weights, stream());
      const DeviceArray<std::int32_t> device_place_of(place_of, stream());
      ASSERT_TRUE(CombineExperts<T>({.in = device_in.data(),
                                     .place_of = device_place_of.data(),
                                     .weights = device_weights.data(),
                                     .residual = adds ? out.data() : nullptr,
                                     .out = out.data(),
                                     .num_rows = rows,
                                     .top_k = top_k,
                                     .size = size},
                                    stream())
                      .ok());
      ExpectClose<T>(ReadFloats(out), want, 3e-6);
    }
  });
}

WEFT_IN_EVERY_ORDER(MoeCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
