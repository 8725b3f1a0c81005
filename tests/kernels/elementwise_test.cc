#include "kernels/elementwise.h"

#include <limits>

#include "tests/kernels/kernel_test.h"

namespace weft::kernels {
namespace {

using ElementwiseTest = KernelTest;

TEST_P(ElementwiseTest, RmsNormMatchesDoubles) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(30); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 0, 70);
    const std::int32_t size = RandomInt(rng, 1, seed % 3 == 0 ? 3000 : 70);
    const float eps = seed % 2 == 0 ? 1e-5F : 1e-6F;
    const std::vector<float> x =
        RandomFloats(rng, std::int64_t{rows} * size, seed % 5 == 0 ? 1e-3F : 3.0F);
    const std::vector<float> weight = RandomFloats(rng, size);
    std::vector<float> out = x;  // in place
    ASSERT_TRUE(RmsNorm({.x = out.data(),
                         .weight = weight.data(),
                         .out = out.data(),
                         .num_rows = rows,
                         .size = size,
                         .eps = eps},
                        stream)
                    .ok());
    for (std::int32_t row = 0; row < rows; ++row) {
      double squares = 0.0;
      for (std::int32_t i = 0; i < size; ++i) squares += std::pow(double{x[row * size + i]}, 2);
      const double scale = 1.0 / std::sqrt(squares / size + eps);
      for (std::int32_t i = 0; i < size; ++i) {
        const double want = x[row * size + i] * scale * weight[i];
        ASSERT_NEAR(out[row * size + i], want, 2e-6 * std::abs(want) + 1e-30);
      }
    }
  }
}

TEST_P(ElementwiseTest, RmsNormNormsEachHeadApartAndNothingBetweenRows) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 0, 40);
    const std::int32_t heads = RandomInt(rng, 1, 9);
    const std::int32_t size = RandomInt(rng, 1, 70);
    const std::int64_t stride = std::int64_t{heads} * size + RandomInt(rng, 0, 9);
    const std::vector<float> x = RandomFloats(rng, rows * stride);
    const std::vector<float> weight = RandomFloats(rng, size);
    std::vector<float> out = x;
    ASSERT_TRUE(RmsNorm({.x = out.data(),
                         .weight = weight.data(),
                         .out = out.data(),
                         .num_rows = rows,
                         .size = size,
                         .eps = 1e-3F,
                         .num_heads = heads,
                         .row_stride = stride},
                        stream)
                    .ok());
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < stride; ++i) {
        const std::int64_t at = row * stride + i;
        if (i >= std::int64_t{heads} * size) {
          ASSERT_EQ(out[at], x[at]) << "between rows";
          continue;
        }
        const std::int64_t head = at - i % size;
        double squares = 0.0;
        for (std::int64_t j = 0; j < size; ++j) squares += std::pow(double{x[head + j]}, 2);
        const double want = x[at] / std::sqrt(squares / size + 1e-3F) * weight[i % size];
        ASSERT_NEAR(out[at], want, 2e-6 * std::abs(want) + 1e-30);
      }
    }
  }
}

TEST_P(ElementwiseTest, RopeRotatesHalves) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 0, 40);
    const std::int32_t heads = RandomInt(rng, 1, 9);
    const std::int32_t half = RandomInt(rng, 1, 40);
    const std::int64_t gap = seed % 2 == 0 ? 0 : RandomInt(rng, 0, 9);  // between heads
    const std::int64_t head_stride = 2 * half + gap;
    const std::int64_t stride = head_stride * heads + RandomInt(rng, 0, 9);
    const std::vector<float> x = RandomFloats(rng, rows * stride);
    std::vector<float> cos;
    std::vector<float> sin;
    for (const float angle : RandomFloats(rng, std::int64_t{rows} * half, 100.0F)) {
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
    std::vector<float> out = x;
    ASSERT_TRUE(Rope({.x = out.data(),
                      .cos = cos.data(),
                      .sin = sin.data(),
                      .num_rows = rows,
                      .num_heads = heads,
                      .head_dim = 2 * half,
                      .row_stride = stride,
                      .head_stride = gap == 0 ? 0 : head_stride},
                     stream)
                    .ok());
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < stride; ++i) {
        const std::int64_t at = row * stride + i;
        if (i >= head_stride * heads || i % head_stride >= 2 * half) {
          ASSERT_EQ(out[at], x[at]) << "between heads or rows";
          continue;
        }
        const std::int64_t pair = i % head_stride % half;
        const double c = cos[row * half + pair];
        const double s = sin[row * half + pair];
        const double want =
            i % head_stride < half ? x[at] * c - x[at + half] * s : x[at] * c + x[at - half] * s;
        ASSERT_NEAR(out[at], want, 1e-6);
      }
    }
  }
}

TEST_P(ElementwiseTest, SiluMulMatchesDoublesEverywhere) {
  CpuStream stream(2);
  for (const std::int32_t size : {1, 7, 64, 1003}) {
    Rng rng(static_cast<std::uint64_t>(size));
    const std::int32_t rows = 5;
    std::vector<float> gate_up = RandomFloats(rng, std::int64_t{rows} * 2 * size, 20.0F);
    gate_up[0] = -500.0F;
    std::vector<float> out(static_cast<std::size_t>(rows) * size);
    const auto run = [&] {
      ASSERT_TRUE(
          SiluMul({.gate_up = gate_up.data(), .out = out.data(), .num_rows = rows, .size = size},
                  stream)
              .ok());
    };
    run();
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int32_t i = 0; i < size; ++i) {
        const double x = gate_up[row * 2 * size + i];
        const double want = x / (1.0 + std::exp(-x)) * gate_up[row * 2 * size + size + i];
        ASSERT_NEAR(out[row * size + i], want, 2e-6 * std::abs(want) + 1e-30);
      }
    }
    gate_up[0] = std::numeric_limits<float>::quiet_NaN();
    run();
    EXPECT_TRUE(std::isnan(out[0]));
  }
}

TEST_P(ElementwiseTest, RowsDoNotDependOnBatchOrThreads) {
  CpuStream one(1);
  CpuStream three(3);
  Rng rng(11);
  constexpr std::int32_t kRows = 65;
  constexpr std::int32_t kSize = 531;
  const std::vector<float> x = RandomFloats(rng, kRows * 2 * kSize);
  const std::vector<float> weight = RandomFloats(rng, kSize);
  std::vector<float> norm(kRows * kSize);
  std::vector<float> silu(kRows * kSize);
  const auto run = [&](std::int32_t row, std::int32_t rows, CpuStream& stream,
                       std::vector<float>& norm_out, std::vector<float>& silu_out) {
    ASSERT_TRUE(RmsNorm({.x = x.data() + row * kSize,
                         .weight = weight.data(),
                         .out = norm_out.data() + row * kSize,
                         .num_rows = rows,
                         .size = kSize,
                         .eps = 1e-5F},
                        stream)
                    .ok());
    ASSERT_TRUE(SiluMul({.gate_up = x.data() + row * 2 * kSize,
                         .out = silu_out.data() + row * kSize,
                         .num_rows = rows,
                         .size = kSize},
                        stream)
                    .ok());
  };
  run(0, kRows, three, norm, silu);
  std::vector<float> norm_alone(kRows * kSize);
  std::vector<float> silu_alone(kRows * kSize);
  for (std::int32_t row = 0; row < kRows; ++row) run(row, 1, one, norm_alone, silu_alone);
  EXPECT_TRUE(SameBits(norm, norm_alone));
  EXPECT_TRUE(SameBits(silu, silu_alone));
}

TEST_P(ElementwiseTest, GatherRowsCopies) {
  CpuStream stream(2);
  const std::vector<float> in = {0, 1, 10, 11, 20, 21};
  const std::vector<std::int32_t> index = {2, 0, 2, 1};
  std::vector<float> out(8);
  ASSERT_TRUE(
      GatherRows(
          {.in = in.data(), .index = index.data(), .out = out.data(), .num_rows = 4, .size = 2},
          stream)
          .ok());
  EXPECT_EQ(out, (std::vector<float>{20, 21, 0, 1, 20, 21, 10, 11}));
}

TEST_P(ElementwiseTest, RopeIntoAnotherPlaceIsRopeInPlace) {
  CpuStream stream(2);
  Rng rng(8);
  constexpr std::int32_t kRows = 5;
  constexpr std::int32_t kHeads = 3;
  constexpr std::int32_t kDim = 14;
  const std::vector<float> x = RandomFloats(rng, kRows * kHeads * kDim);
  const std::vector<float> cos = RandomFloats(rng, kRows * kDim / 2);
  const std::vector<float> sin = RandomFloats(rng, kRows * kDim / 2);
  std::vector<float> in_place = x;
  std::vector<float> from = x;
  std::vector<float> out(kRows * 100, -7.0F);
  RopeParams params = {.x = in_place.data(),
                       .cos = cos.data(),
                       .sin = sin.data(),
                       .num_rows = kRows,
                       .num_heads = kHeads,
                       .head_dim = kDim,
                       .row_stride = kHeads * kDim};
  ASSERT_TRUE(Rope(params, stream).ok());
  params.x = from.data();
  params.out = out.data() + 2;
  params.out_row_stride = 100;
  params.out_head_stride = 30;
  ASSERT_TRUE(Rope(params, stream).ok());
  EXPECT_EQ(from, x);
  for (std::int32_t row = 0; row < kRows; ++row) {
    for (std::int32_t i = 0; i < 100; ++i) {
      const std::int32_t head = (i - 2) / 30;
      const std::int32_t dim = i < 2 ? kDim : (i - 2) % 30;
      const bool written = head < kHeads && dim < kDim;
      ASSERT_EQ(out[row * 100 + i], written ? in_place[(row * kHeads + head) * kDim + dim] : -7.0F);
    }
  }
}

WEFT_FOR_EACH_TARGET(ElementwiseTest);

}  // namespace
}  // namespace weft::kernels
