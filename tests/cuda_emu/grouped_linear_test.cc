#include "kernels/cuda/grouped_linear.h"

#include <array>

#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

constexpr float kUnwritten = -77.0F;

// Experts with their rows, and a layer's input that the rows are of.
struct Experts {
  std::int32_t in_features;
  std::int32_t out_features;
  std::vector<std::int32_t> begin = {0};
  std::vector<std::int32_t> row_of;  // of all rows that might be routed
  std::vector<float> x;
  std::vector<std::vector<float>> weights;

  Experts(Rng& rng, std::int32_t in, std::int32_t out, const std::vector<std::int32_t>& rows,
          std::int32_t spare_rows)
      : in_features(in), out_features(out) {
    constexpr std::int32_t kRowsOfX = 9;
    for (const std::int32_t count : rows) {
      begin.push_back(begin.back() + count);
      weights.push_back(RandomFloats(rng, std::int64_t{in} * out));
    }
    for (std::int32_t i = 0; i < begin.back(); ++i)
      row_of.push_back(RandomInt(rng, 0, kRowsOfX - 1));
    row_of.resize(row_of.size() + spare_rows, 1 << 30);  // who reads that crashes
    x = RandomFloats(rng, std::int64_t{kRowsOfX} * in);
  }
};

template <typename W>
std::vector<float> OnGpu(const Experts& experts, CudaStream& stream) {
  std::vector<std::unique_ptr<DeviceArray<W>>> weights;
  std::vector<const W*> pointers;
  for (const auto& weight : experts.weights) {
    weights.push_back(std::make_unique<DeviceArray<W>>(Stored<W>(weight), stream));
    pointers.push_back(weights.back()->data());
  }
  const DeviceArray<const W*> device_weights(pointers, stream);
  const DeviceArray<float> x(experts.x, stream);
  const DeviceArray<std::int32_t> row_of(experts.row_of, stream);
  const DeviceArray<std::int32_t> begin(experts.begin, stream);
  const std::size_t rows = experts.row_of.size();
  const DeviceArray<float> y(
      std::vector<float>(rows * static_cast<std::size_t>(experts.out_features), kUnwritten),
      stream);
  cuda_emu::ResetCounters();
  const absl::Status status =
      GroupedLinear<W>({.x = x.data(),
                        .row_of = row_of.data(),
                        .expert_begin = begin.data(),
                        .weights = device_weights.data(),
                        .y = y.data(),
                        .num_experts = static_cast<std::int32_t>(experts.weights.size()),
                        .max_rows = static_cast<std::int32_t>(rows),
                        .in_features = experts.in_features,
                        .out_features = experts.out_features,
                        .x_stride = experts.in_features,
                        .y_stride = experts.out_features},
                       stream);
  EXPECT_TRUE(status.ok()) << status;
  return y.Read();
}

// Products of rounded values in double precision.
template <typename W>
void ExpectProducts(const Experts& experts, const std::vector<float>& y) {
  const auto x = RoundedFloats<W>(experts.x);
  for (std::size_t e = 0; e < experts.weights.size(); ++e) {
    const auto weight = RoundedFloats<W>(experts.weights[e]);
    for (std::int32_t i = experts.begin[e]; i < experts.begin[e + 1]; ++i) {
      for (std::int32_t out = 0; out < experts.out_features; ++out) {
        double want = 0.0;
        double size = 0.0;
        for (std::int32_t k = 0; k < experts.in_features; ++k) {
          const double product =
              double{x[std::int64_t{experts.row_of[i]} * experts.in_features + k]} *
              weight[std::int64_t{out} * experts.in_features + k];
          want += product;
          size += std::abs(product);
        }
        ASSERT_NEAR(y[std::int64_t{i} * experts.out_features + out], want, 1e-6 * size + 1e-6)
            << "expert " << e << " row " << i << " output " << out;
      }
    }
  }
  for (std::size_t i = static_cast<std::size_t>(experts.begin.back()) * experts.out_features;
       i < y.size(); ++i) {
    ASSERT_EQ(y[i], kUnwritten) << "past the routed rows";
  }
}

using GroupedLinearCudaTest = CudaTest;

TEST_P(GroupedLinearCudaTest, IsTheProductOfEachRowWithItsExpert) {
  ForEachType([&](auto type) {
    using W = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(8); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      std::vector<std::int32_t> rows;
      for (std::int32_t i = RandomInt(rng, 1, seed % 6 == 5 ? 200 : 4); i > 0; --i) {
        const std::int32_t most = rows.size() > 5 ? 1 : seed % 5 == 0 ? 70 / kShrink : 9;
        rows.push_back(RandomInt(rng, 0, 2) == 0 ? 0 : RandomInt(rng, 0, most));
      }
      // In steps of tensor cores, with what is left over, and not for them at all.
      const std::int32_t in = seed % 4 == 3 ? RandomInt(rng, 1, 80) : 8 * RandomInt(rng, 1, 20);
      const std::int32_t most_outs = seed % 5 == 0 ? 30 : 140 / kShrink;
      const std::int32_t out =
          RandomInt(rng, 0, 3) == 0 ? RandomInt(rng, 1, 40) : 2 * RandomInt(rng, 1, most_outs);
      const Experts experts(rng, in, out, rows, RandomInt(rng, 0, 5));
      ExpectProducts<W>(experts, OnGpu<W>(experts, stream()));
      if (HasFatalFailure()) return;
    }
  });
}

// Law 2: batching must not change a token, whichever tile it leads to.
TEST_P(GroupedLinearCudaTest, RowsDoNotDependOnTheBatch) {
  ForEachType([&](auto type) {
    using W = decltype(type);
    Rng rng(2);
    Experts experts(rng, 136, 20, {40, 3}, 0);
    const std::vector<float> together = OnGpu<W>(experts, stream());
    experts.begin = {0, 1, 2};
    experts.row_of = {experts.row_of[7], experts.row_of[41]};
    const std::vector<float> alone = OnGpu<W>(experts, stream());
    EXPECT_EQ(std::vector<float>(together.begin() + 7 * 20, together.begin() + 8 * 20),
              std::vector<float>(alone.begin(), alone.begin() + 20));
    EXPECT_EQ(std::vector<float>(together.begin() + 41 * 20, together.begin() + 42 * 20),
              std::vector<float>(alone.begin() + 20, alone.end()));
  });
}

// The heads of a layer: a row has each head's input side by side, and gets each head's output so.
TEST_P(GroupedLinearCudaTest, HeadsTakeTheirOwnColumns) {
  ForEachType([&](auto type) {
    using W = decltype(type);
    for (const auto& [in, out, rows] : {std::array{40, 12, 3}, std::array{7, 5, 2},
                                        std::array{24, 130 / kShrink * 2, 18 / kShrink + 1}}) {
      Rng rng(4);
      constexpr std::int32_t kHeads = 3;
      const Experts heads(rng, in, out, std::vector<std::int32_t>(kHeads, 0), 0);
      const auto x = RandomFloats(rng, std::int64_t{rows} * kHeads * in);
      std::vector<std::unique_ptr<DeviceArray<W>>> weights;
      std::vector<const W*> pointers;
      for (const auto& weight : heads.weights) {
        weights.push_back(std::make_unique<DeviceArray<W>>(Stored<W>(weight), stream()));
        pointers.push_back(weights.back()->data());
      }
      const DeviceArray<const W*> device_weights(pointers, stream());
      const DeviceArray<float> device_x(x, stream());
      const DeviceArray<float> y(static_cast<std::size_t>(rows * kHeads * out), stream());
      ASSERT_TRUE(GroupedLinear<W>({.x = device_x.data(),
                                    .weights = device_weights.data(),
                                    .y = y.data(),
                                    .num_experts = kHeads,
                                    .max_rows = rows,
                                    .in_features = in,
                                    .out_features = out,
                                    .x_stride = kHeads * in,
                                    .y_stride = kHeads * out,
                                    .x_expert_stride = in,
                                    .y_expert_stride = out},
                                   stream())
                      .ok());
      const auto got = y.Read();
      const auto rounded = RoundedFloats<W>(x);
      std::vector<std::vector<float>> rounded_weights;
      for (const auto& weight : heads.weights) rounded_weights.push_back(RoundedFloats<W>(weight));
      for (std::int32_t i = 0; i < rows * kHeads * out; ++i) {
        const std::int32_t head = i / out % kHeads;
        const auto& weight = rounded_weights[head];
        double want = 0.0;
        for (std::int32_t k = 0; k < in; ++k)
          want += double{rounded[i / out * in + k]} * weight[i % out * in + k];
        ASSERT_NEAR(got[i], want, 1e-5) << i;
      }
    }
  });
}

WEFT_IN_EVERY_ORDER(GroupedLinearCudaTest);

// A step of decoding: few rows an expert, so that weights are what is read.
TEST(GroupedLinearCostTest, NoBankConflictsAndLittleMoreThanEveryByteOnce) {
  auto stream = CudaStream::Create();
  ASSERT_TRUE(stream.ok());
  Rng rng(3);
  const Experts experts(rng, 256, 512 / kShrink * 2, {2, 0, 1, 2}, 3);
  OnGpu<BFloat16>(experts, **stream);
  const cuda_emu::Counters& counters = cuda_emu::CountersOfThread();
  EXPECT_GT(counters.matrix_loads, 0);
  EXPECT_EQ(counters.bank_conflicts, 0);
  const std::int64_t weights = 3 * std::int64_t{experts.in_features} * experts.out_features * 2;
  const std::int64_t rows = 5 * 4 * std::int64_t{experts.in_features + experts.out_features};
  EXPECT_LE(counters.global_read_bytes + counters.global_written_bytes, (weights + rows) * 11 / 10);
}

}  // namespace
}  // namespace weft::kernels::cuda
