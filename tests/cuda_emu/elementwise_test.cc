#include "kernels/elementwise.h"

#include "kernels/cuda/elementwise.h"
#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

using ElementwiseCudaTest = CudaTest;

TEST_P(ElementwiseCudaTest, RmsNormOfASumIsTheCpus) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(12); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      const std::int32_t rows = RandomInt(rng, 0, 3);
      const std::int32_t heads = RandomInt(rng, 1, 3);
      const std::int32_t size = seed % 2 == 0 ? 8 * RandomInt(rng, 1, 70) : RandomInt(rng, 1, 400);
      const std::int64_t stride = std::int64_t{heads} * size + (seed % 3 == 0 ? 8 : 0);
      const bool adds = seed % 4 < 2;
      const auto x = RoundedFloats<T>(RandomFloats(rng, rows * stride, 2.0F));
      const auto residual = RoundedFloats<T>(RandomFloats(rng, rows * stride));
      const auto weight = RandomFloats(rng, size);
      std::vector<float> sum = x;
      for (std::size_t i = 0; adds && i < sum.size(); ++i)
        sum[i] = Wide(Rounded<T>(x[i] + residual[i]));
      std::vector<float> want = sum;
      ASSERT_TRUE(kernels::RmsNorm({.x = sum.data(),
                                    .weight = weight.data(),
                                    .out = want.data(),
                                    .num_rows = rows,
                                    .size = size,
                                    .eps = 1e-5F,
                                    .num_heads = heads,
                                    .row_stride = stride},
                                   cpu)
                      .ok());
      const DeviceArray<T> device_x(Stored<T>(x), stream());
      const DeviceArray<T> device_residual(Stored<T>(residual), stream());
      const DeviceArray<float> device_weight(weight, stream());
      const DeviceArray<T> out(Stored<T>(sum), stream());  // what is between rows stays
      ASSERT_TRUE(RmsNorm<T>({.x = device_x.data(),
                              .residual = adds ? device_residual.data() : nullptr,
                              .weight = device_weight.data(),
                              .sum = adds ? device_residual.data() : nullptr,
                              .out = out.data(),
                              .num_rows = rows,
                              .size = size,
                              .eps = 1e-5F,
                              .num_heads = heads,
                              .row_stride = stride},
                             stream())
                      .ok());
      ExpectClose<T>(ReadFloats(out), want, 2e-6);
      if (!adds) continue;
      const auto got_sum = ReadFloats(device_residual);
      for (std::int64_t i = 0; i < rows * stride; ++i) {
        ASSERT_EQ(got_sum[i], i % stride < std::int64_t{heads} * size ? sum[i] : residual[i]);
      }
    }
  });
}

TEST_P(ElementwiseCudaTest, RmsNormOfWideRows) {
  Rng rng(1);
  for (const std::int32_t size : {1025, 4096, 16384}) {
    const auto x = RandomFloats(rng, size);
    const std::vector<float> weight(size, 1.0F);
    std::vector<float> want(size);
    ASSERT_TRUE(kernels::RmsNorm({.x = x.data(),
                                  .weight = weight.data(),
                                  .out = want.data(),
                                  .num_rows = 1,
                                  .size = size,
                                  .eps = 1e-5F},
                                 cpu)
                    .ok());
    const DeviceArray<float> device_x(x, stream());
    const DeviceArray<float> device_weight(weight, stream());
    ASSERT_TRUE(RmsNorm<float>({.x = device_x.data(),
                                .residual = nullptr,
                                .weight = device_weight.data(),
                                .sum = nullptr,
                                .out = device_x.data(),
                                .num_rows = 1,
                                .size = size,
                                .eps = 1e-5F},
                               stream())
                    .ok());
    ExpectClose<float>(device_x.Read(), want, 2e-6);
  }
  const absl::Status status =
      RmsNorm<float>({.num_rows = 1, .size = kMaxDeviceNormSize + 1}, stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("16385"), std::string::npos) << status;
}

TEST_P(ElementwiseCudaTest, RopeOfNormedHeadsIsTheCpus) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(12); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      const std::int32_t rows = RandomInt(rng, 0, 4);
      const std::int32_t heads = RandomInt(rng, 1, 5);
      const std::int32_t dim = 2 * RandomInt(rng, 1, seed % 4 == 0 ? 256 : 64);
      const std::int64_t head_stride = dim + RandomInt(rng, 0, 3);
      const std::int64_t row_stride = heads * head_stride + 5;
      const bool norms = seed % 2 == 0;
      const auto x = RoundedFloats<T>(RandomFloats(rng, rows * row_stride));
      const auto weight = RandomFloats(rng, dim);
      const auto cos = RandomFloats(rng, rows * dim / 2);
      const auto sin = RandomFloats(rng, rows * dim / 2);
      std::vector<float> want = x;
      for (std::int64_t at = 0; norms && at < std::int64_t{rows} * heads; ++at) {
        float* head = want.data() + at / heads * row_stride + at % heads * head_stride;
        ASSERT_TRUE(kernels::RmsNorm({.x = head,
                                      .weight = weight.data(),
                                      .out = head,
                                      .num_rows = 1,
                                      .size = dim,
                                      .eps = 1e-6F},
                                     cpu)
                        .ok());
      }
      ASSERT_TRUE(kernels::Rope({.x = want.data(),
                                 .cos = cos.data(),
                                 .sin = sin.data(),
                                 .num_rows = rows,
                                 .num_heads = heads,
                                 .head_dim = dim,
                                 .row_stride = row_stride,
                                 .head_stride = head_stride},
                                cpu)
                      .ok());
      const DeviceArray<T> device_x(Stored<T>(x), stream());
      const DeviceArray<float> device_cos(cos, stream());
      const DeviceArray<float> device_sin(sin, stream());
      const DeviceArray<float> device_weight(weight, stream());
      const DeviceArray<T> elsewhere(Stored<T>(x), stream());
      const bool in_place = seed % 3 == 0;
      ASSERT_TRUE(Rope<T>({.x = device_x.data(),
                           .cos = device_cos.data(),
                           .sin = device_sin.data(),
                           .num_rows = rows,
                           .num_heads = heads,
                           .head_dim = dim,
                           .row_stride = row_stride,
                           .head_stride = head_stride,
                           .out = in_place ? nullptr : elsewhere.data(),
                           .out_row_stride = row_stride,
                           .out_head_stride = head_stride,
                           .norm_weight = norms ? device_weight.data() : nullptr,
                           .eps = 1e-6F},
                          stream())
                      .ok());
      // A difference may be small beside what it is of.
      ExpectClose<T>(ReadFloats(in_place ? device_x : elsewhere), want, 5e-6);
    }
  });
}

TEST_P(ElementwiseCudaTest, SiluMulIsTheCpus) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (const std::int32_t size : {1, 7, 64, 1003, 2056}) {
      SCOPED_TRACE(size);
      Rng rng(static_cast<std::uint64_t>(size));
      const std::int32_t rows = 2;
      auto gate_up = RoundedFloats<T>(RandomFloats(rng, std::int64_t{rows} * 2 * size, 10.0F));
      gate_up[0] = -100.0F;
      std::vector<float> want(rows * size);
      ASSERT_TRUE(
          kernels::SiluMul(
              {.gate_up = gate_up.data(), .out = want.data(), .num_rows = rows, .size = size}, cpu)
              .ok());
      const DeviceArray<T> device_gate_up(Stored<T>(gate_up), stream());
      const DeviceArray<T> out(want.size(), stream());
      ASSERT_TRUE(
          SiluMul<T>(
              {.gate_up = device_gate_up.data(), .out = out.data(), .num_rows = rows, .size = size},
              stream())
              .ok());
      ExpectClose<T>(ReadFloats(out), want, 3e-6);
    }
  });
}

TEST_P(ElementwiseCudaTest, GatherRowsCopies) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (const std::int32_t size : {1, 8, 24, 1001}) {
      Rng rng(2);
      const auto in = RoundedFloats<T>(RandomFloats(rng, std::int64_t{5} * size));
      const std::vector<std::int32_t> index = {2, 0, 4, 2};
      std::vector<float> want(index.size() * size);
      ASSERT_TRUE(kernels::GatherRows({.in = in.data(),
                                       .index = index.data(),
                                       .out = want.data(),
                                       .num_rows = 4,
                                       .size = size},
                                      cpu)
                      .ok());
      const DeviceArray<T> device_in(Stored<T>(in), stream());
      const DeviceArray<std::int32_t> device_index(index, stream());
      const DeviceArray<T> out(want.size(), stream());
      ASSERT_TRUE(GatherRows<T>({.in = device_in.data(),
                                 .index = device_index.data(),
                                 .out = out.data(),
                                 .num_rows = 4,
                                 .size = size},
                                stream())
                      .ok());
      EXPECT_EQ(ReadFloats(out), want);
    }
  });
}

WEFT_IN_EVERY_ORDER(ElementwiseCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
