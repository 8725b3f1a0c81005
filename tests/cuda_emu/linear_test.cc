#include "kernels/cuda/linear.h"

#include "kernels/linear.h"
#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

template <typename T>
constexpr DType kDTypeOf = DType::kFloat32;
template <>
constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
constexpr DType kDTypeOf<Float16> = DType::kFloat16;

template <typename T>
PackedMatrix Packed(const std::vector<T>& values, std::int32_t rows, std::int32_t cols,
                    CpuStream& cpu) {
  const MatrixView view = {
      .data = values.data(), .dtype = kDTypeOf<T>, .rows = rows, .cols = cols, .row_stride = cols};
  auto packed = PackedMatrix::Pack({&view, 1}, FormatOf(kDTypeOf<T>), cpu);
  EXPECT_TRUE(packed.ok()) << packed.status();
  return *std::move(packed);
}

class LinearCudaTest : public CudaTest {};

TEST_P(LinearCudaTest, ProductsAreTheCpusOfTheRoundedRows) {
  auto matmul = Matmul::Create();
  ASSERT_TRUE(matmul.ok()) << matmul.status();
  for (std::uint64_t seed = 0; seed < NumSeeds(12); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ForEachType([&]<typename T>(T) {
      Rng rng(seed);
      const std::int32_t num_rows = RandomInt(rng, 0, 9);
      const std::int32_t in = RandomInt(rng, 1, 70);
      const std::int32_t out = RandomInt(rng, 1, 70);
      const std::int64_t x_stride = in + RandomInt(rng, 0, 5);
      const std::int64_t y_stride = out + RandomInt(rng, 0, 5);
      const bool in_place = RandomInt(rng, 0, 1) == 0;
      const auto weight = Stored<T>(RandomFloats(rng, std::int64_t{out} * in));
      const auto x = RandomFloats(rng, num_rows * x_stride);
      const auto bias = RandomFloats(rng, out);
      const auto y = RandomFloats(rng, num_rows * y_stride);
      const bool has_bias = RandomInt(rng, 0, 1) == 0;
      const bool has_residual = in_place || RandomInt(rng, 0, 1) == 0;

      std::vector<float> want = y;
      const std::vector<float> rounded = RoundedFloats<T>(x);
      const PackedMatrix packed = Packed(weight, out, in, cpu);
      ASSERT_TRUE(kernels::Linear({.x = rounded.data(),
                                   .weight = &packed,
                                   .bias = has_bias ? bias.data() : nullptr,
                                   .residual = has_residual ? y.data() : nullptr,
                                   .y = want.data(),
                                   .num_rows = num_rows,
                                   .x_stride = x_stride,
                                   .y_stride = y_stride},
                                  cpu)
                      .ok());

      const DeviceArray<T> weight_d(weight, stream());
      const DeviceArray<float> x_d(x, stream());
      const DeviceArray<float> bias_d(bias, stream());
      const DeviceArray<float> residual_d(y, stream());
      const DeviceArray<float> y_d(y, stream());
      const DeviceArray<T> rounded_d(static_cast<std::size_t>(num_rows * in), stream());
      MatmulParams params = {.x = x_d.data(),
                             .weight = weight_d.data(),
                             .bias = has_bias ? bias_d.data() : nullptr,
                             .residual = in_place       ? y_d.data()
                                         : has_residual ? residual_d.data()
                                                        : nullptr,
                             .y = y_d.data(),
                             .num_rows = num_rows,
                             .in_features = in,
                             .out_features = out,
                             .x_stride = x_stride,
                             .y_stride = y_stride,
                             .dtype = kDTypeOf<T>};
      if constexpr (!std::is_same_v<T, float>) {
        ASSERT_TRUE(RoundRows<T>({.x = x_d.data(),
                                  .out = rounded_d.data(),
                                  .num_rows = num_rows,
                                  .size = in,
                                  .x_stride = x_stride},
                                 stream())
                        .ok());
        params.x = rounded_d.data();
        params.x_stride = in;
      }
      const absl::Status status = (*matmul)->Run(params, stream());
      ASSERT_TRUE(status.ok()) << status;
      ExpectClose<float>(y_d.Read(), want, 1e-5);
    });
    if (HasFatalFailure()) return;
  }
}

TEST_P(LinearCudaTest, EmbeddingsAreTheWeightsRowsAndZeroElsewhere) {
  ForEachType([&]<typename T>(T) {
    Rng rng(3);
    for (const std::int32_t size : {1, 256, 300}) {
      constexpr std::int32_t kRows = 7;
      const auto weight = Stored<T>(RandomFloats(rng, std::int64_t{kRows} * size));
      const std::vector<std::int32_t> ids = {10, 9, 16, 17, 13, 0};
      std::vector<float> want(ids.size() * size);
      const PackedMatrix packed = Packed(weight, kRows, size, cpu);
      ASSERT_TRUE(kernels::Embedding({.weight = &packed,
                                      .ids = ids.data(),
                                      .out = want.data(),
                                      .num_rows = static_cast<std::int32_t>(ids.size()),
                                      .first_row = 10},
                                     cpu)
                      .ok());
      const DeviceArray<T> weight_d(weight, stream());
      const DeviceArray<std::int32_t> ids_d(ids, stream());
      const DeviceArray<float> out(want.size(), stream());
      ASSERT_TRUE(Embedding<T>({.weight = weight_d.data(),
                                .ids = ids_d.data(),
                                .out = out.data(),
                                .num_rows = static_cast<std::int32_t>(ids.size()),
                                .first_row = 10,
                                .num_weight_rows = kRows,
                                .size = size},
                               stream())
                      .ok());
      EXPECT_EQ(out.Read(), want);
    }
  });
}

WEFT_IN_EVERY_ORDER(LinearCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
