#include "kernels/lse_merge.h"

#include "kernels/cuda/lse_merge.h"
#include "kernels/head_exchange.h"
#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

using LseMergeCudaTest = CudaTest;

// Parts as an all-to-all brings them; what is empty or padding holds NaN.
struct Case {
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t padded_heads;
  std::int32_t head_dim;
  std::vector<float> parts;  // [part, row, padded head, dim]
  std::vector<float> lse;    // [part, row, padded head]

  Case(Rng& rng, bool wide)
      : num_parts(RandomInt(rng, 1, 9)),
        num_rows(RandomInt(rng, 0, 5)),
        num_heads(RandomInt(rng, 1, 5)),
        padded_heads(num_heads + RandomInt(rng, 0, 2)),
        head_dim(wide ? 8 * RandomInt(rng, 1, 70) : RandomInt(rng, 1, 70)) {
    const std::int64_t heads = std::int64_t{num_parts} * num_rows * padded_heads;
    parts = RandomFloats(rng, heads * head_dim);
    lse = RandomFloats(rng, heads, RandomInt(rng, 0, 2) == 0 ? 60.0F : 3.0F);
    for (std::int64_t head = 0; head < heads; ++head) {
      if (head % padded_heads < num_heads && RandomInt(rng, 0, 2) != 0) continue;
      lse[head] = head % padded_heads < num_heads ? -kInfinity : std::nanf("");
      std::fill_n(parts.begin() + head * head_dim, head_dim, std::nanf(""));
    }
  }

  // [parts, rows, num_heads, size] out of padded ones.
  std::vector<float> WithoutPadding(const std::vector<float>& padded, std::int32_t size) const {
    std::vector<float> dense;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(padded.size()) / size; ++i) {
      if (i % padded_heads >= num_heads) continue;
      dense.insert(dense.end(), padded.begin() + i * size, padded.begin() + (i + 1) * size);
    }
    return dense;
  }
};

TEST_P(LseMergeCudaTest, MergesPaddedPartsAsTheCpuDoes) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(16); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      Case merge(rng, seed % 2 == 0);
      merge.parts = RoundedFloats<T>(merge.parts);
      const auto parts = merge.WithoutPadding(merge.parts, merge.head_dim);
      const auto lse = merge.WithoutPadding(merge.lse, 1);
      const std::int64_t heads = std::int64_t{merge.num_rows} * merge.num_heads;
      const std::int64_t padded = std::int64_t{merge.num_rows} * merge.padded_heads;
      std::vector<float> want(heads * merge.head_dim);
      std::vector<float> want_lse(heads);
      ASSERT_TRUE(kernels::LseMerge({.parts = parts.data(),
                                     .lse = lse.data(),
                                     .part_stride = heads * merge.head_dim,
                                     .lse_stride = heads,
                                     .out = want.data(),
                                     .merged_lse = want_lse.data(),
                                     .num_parts = merge.num_parts,
                                     .num_rows = merge.num_rows,
                                     .num_heads = merge.num_heads,
                                     .head_dim = merge.head_dim},
                                    cpu)
                      .ok());
      const DeviceArray<T> device_parts(Stored<T>(merge.parts), stream());
      const DeviceArray<float> device_lse(merge.lse, stream());
      const DeviceArray<T> out(want.size(), stream());
      const DeviceArray<float> out_lse(want_lse.size(), stream());
      ASSERT_TRUE(LseMerge<T>({.parts = device_parts.data(),
                               .lse = device_lse.data(),
                               .part_stride = padded * merge.head_dim,
                               .lse_stride = padded,
                               .out = out.data(),
                               .merged_lse = out_lse.data(),
                               .num_parts = merge.num_parts,
                               .num_rows = merge.num_rows,
                               .num_heads = merge.num_heads,
                               .padded_heads = merge.padded_heads,
                               .head_dim = merge.head_dim},
                              stream())
                      .ok());
      ExpectClose<T>(ReadFloats(out), want, 2e-6);
      const auto got_lse = out_lse.Read();
      for (std::int64_t i = 0; i < heads; ++i) {
        if (want_lse[i] == -kInfinity) {
          ASSERT_EQ(got_lse[i], -kInfinity);
        } else {
          ASSERT_NEAR(got_lse[i], want_lse[i], 2e-6 * std::max(1.0F, std::abs(want_lse[i])));
        }
      }
    }
  });
}

TEST_P(LseMergeCudaTest, ScaleIsTheCpus) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(8); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      Case merge(rng, seed % 2 == 0);
      const auto parts = merge.WithoutPadding(RoundedFloats<T>(merge.parts), merge.head_dim);
      const auto lse = merge.WithoutPadding(merge.lse, 1);
      const std::size_t size = parts.size() / static_cast<std::size_t>(merge.num_parts);
      for (std::int32_t part = 0; part < merge.num_parts; ++part) {
        std::vector<float> want(parts.begin() + part * static_cast<std::int64_t>(size),
                                parts.begin() + (part + 1) * static_cast<std::int64_t>(size));
        const DeviceArray<T> out(Stored<T>(want), stream());
        const DeviceArray<float> device_lse(lse, stream());
        ASSERT_TRUE(kernels::LseScale({.out = want.data(),
                                       .lse = lse.data(),
                                       .num_parts = merge.num_parts,
                                       .part = part,
                                       .num_rows = merge.num_rows,
                                       .num_heads = merge.num_heads,
                                       .head_dim = merge.head_dim},
                                      cpu)
                        .ok());
        ASSERT_TRUE(LseScale<T>({.out = out.data(),
                                 .lse = device_lse.data(),
                                 .num_parts = merge.num_parts,
                                 .part = part,
                                 .num_rows = merge.num_rows,
                                 .num_heads = merge.num_heads,
                                 .head_dim = merge.head_dim},
                                stream())
                        .ok());
        ExpectClose<T>(ReadFloats(out), want, 2e-6);
      }
    }
  });
}

TEST_P(LseMergeCudaTest, ANanReachesItsHeadAlone) {
  const float nan = std::nanf("");
  for (const std::vector<float>& bad : std::vector<std::vector<float>>{
           {nan, -kInfinity}, {-kInfinity, nan}, {nan, 1.0F}, {1.0F, nan}, {nan, nan}}) {
    SCOPED_TRACE(std::to_string(bad[0]) + " and " + std::to_string(bad[1]));
    const DeviceArray<float> parts({1.0F, 2.0F, 3.0F, 4.0F}, stream());  // [part, head]
    const DeviceArray<float> lse({bad[0], 0.5F, bad[1], -kInfinity}, stream());
    const DeviceArray<float> out(2, stream());
    const DeviceArray<float> merged(2, stream());
    ASSERT_TRUE(LseMerge<float>({.parts = parts.data(),
                                 .lse = lse.data(),
                                 .part_stride = 2,
                                 .lse_stride = 2,
                                 .out = out.data(),
                                 .merged_lse = merged.data(),
                                 .num_parts = 2,
                                 .num_rows = 1,
                                 .num_heads = 2,
                                 .padded_heads = 2,
                                 .head_dim = 1},
                                stream())
                    .ok());
    EXPECT_TRUE(std::isnan(out.Read()[0]));
    EXPECT_TRUE(std::isnan(merged.Read()[0]));
    EXPECT_EQ(out.Read()[1], 2.0F);
    EXPECT_EQ(merged.Read()[1], 0.5F);
  }
}

TEST_P(LseMergeCudaTest, HeadsPackAndUnpackAsOnTheCpu) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(8); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      const std::int32_t num_parts = RandomInt(rng, 1, 4);
      std::vector<std::int32_t> part_begin = {0};
      std::int32_t padded = 1;
      for (std::int32_t i = 0; i < num_parts; ++i) {
        const std::int32_t count = RandomInt(rng, 0, 3);
        part_begin.push_back(part_begin.back() + count);
        padded = std::max(padded, count);
      }
      const std::int32_t rows = RandomInt(rng, 0, 4);
      const std::int32_t dim = RandomInt(rng, 1, 150);
      const std::int64_t stride = std::int64_t{rows} * padded * dim + RandomInt(rng, 0, 5);
      const auto heads =
          RoundedFloats<T>(RandomFloats(rng, std::int64_t{rows} * part_begin.back() * dim));
      std::vector<float> parts(num_parts * stride, 7.0F);
      const DeviceArray<T> device_parts(Stored<T>(parts), stream());
      const DeviceArray<T> device_heads(Stored<T>(heads), stream());
      const DeviceArray<T> unpacked(heads.size(), stream());
      const DeviceArray<std::int32_t> device_begin(part_begin, stream());
      ASSERT_TRUE(kernels::PackHeads({.part_begin = part_begin.data(),
                                      .num_parts = num_parts,
                                      .num_rows = rows,
                                      .padded_heads = padded,
                                      .head_dim = dim,
                                      .part_stride = stride},
                                     heads.data(), -kInfinity, parts.data(), cpu)
                      .ok());
      const HeadExchangeParams params = {.part_begin = device_begin.data(),
                                         .num_parts = num_parts,
                                         .num_rows = rows,
                                         .padded_heads = padded,
                                         .head_dim = dim,
                                         .part_stride = stride};
      ASSERT_TRUE(
          PackHeads<T>(params, device_heads.data(), -kInfinity, device_parts.data(), stream())
              .ok());
      ASSERT_TRUE(UnpackHeads<T>(params, device_parts.data(), unpacked.data(), stream()).ok());
      EXPECT_EQ(ReadFloats(device_parts), parts);
      EXPECT_EQ(ReadFloats(unpacked), heads);
    }
  });
}

WEFT_IN_EVERY_ORDER(LseMergeCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
