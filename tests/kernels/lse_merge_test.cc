#include "kernels/lse_merge.h"

#include <limits>

#include "tests/kernels/kernel_test.h"

namespace weft::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scores and values of keys, cut into parts by chance; some parts are empty and hold NaN.
struct Case {
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t num_heads;
  std::int32_t head_dim;
  std::vector<float> parts;  // [part, row, head, dim]
  std::vector<float> lse;
  std::vector<double> want;  // one long softmax
  std::vector<double> want_lse;

  explicit Case(Rng& rng)
      : num_parts(RandomInt(rng, 1, 9)),
        num_rows(RandomInt(rng, 0, 40)),
        num_heads(RandomInt(rng, 1, 9)),
        head_dim(RandomInt(rng, 1, 70)) {
    const std::int64_t heads = std::int64_t{num_rows} * num_heads;
    parts.assign(static_cast<std::size_t>(num_parts * heads * head_dim), std::nanf(""));
    lse.assign(static_cast<std::size_t>(num_parts * heads), -kInfinity);
    want.assign(static_cast<std::size_t>(heads * head_dim), 0.0);
    want_lse.assign(static_cast<std::size_t>(heads), -kInfinity);
    for (std::int64_t head = 0; head < heads; ++head) Fill(rng, head, heads);
  }

  void Fill(Rng& rng, std::int64_t head, std::int64_t heads) {
    double all = 0.0;
    std::vector<double> all_out(head_dim);
    const float spread = RandomInt(rng, 0, 3) == 0 ? 60.0F : 3.0F;
    for (std::int32_t part = 0; part < num_parts; ++part) {
      const std::int32_t keys = RandomInt(rng, 0, 2) == 0 ? 0 : RandomInt(rng, 1, 5);
      if (keys == 0) continue;
      double sum = 0.0;
      std::vector<double> out(head_dim);
      for (const float score : RandomFloats(rng, keys, spread)) {
        sum += std::exp(double{score});
        const std::vector<float> value = RandomFloats(rng, head_dim);
        for (std::int32_t i = 0; i < head_dim; ++i) out[i] += std::exp(double{score}) * value[i];
      }
      lse[part * heads + head] = static_cast<float>(std::log(sum));
      for (std::int32_t i = 0; i < head_dim; ++i) {
        parts[(part * heads + head) * head_dim + i] = static_cast<float>(out[i] / sum);
        all_out[i] += out[i];
      }
      all += sum;
    }
    if (all == 0.0) return;
    want_lse[head] = std::log(all);
    for (std::int32_t i = 0; i < head_dim; ++i) want[head * head_dim + i] = all_out[i] / all;
  }

  void ExpectRight(const std::vector<float>& out) const {
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], 3e-5) << i;
  }
};

TEST(LseMergeTest, EqualsOneLongSoftmax) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const Case merge(rng);
    const std::int64_t heads = std::int64_t{merge.num_rows} * merge.num_heads;
    std::vector<float> out(merge.want.size(), -7.0F);
    std::vector<float> lse(merge.want_lse.size(), -7.0F);
    ASSERT_TRUE(LseMerge({.parts = merge.parts.data(),
                          .lse = merge.lse.data(),
                          .part_stride = heads * merge.head_dim,
                          .lse_stride = heads,
                          .out = out.data(),
                          .merged_lse = seed % 2 == 0 ? lse.data() : nullptr,
                          .num_parts = merge.num_parts,
                          .num_rows = merge.num_rows,
                          .num_heads = merge.num_heads,
                          .head_dim = merge.head_dim},
                         stream)
                    .ok());
    merge.ExpectRight(out);
    for (std::size_t i = 0; seed % 2 == 0 && i < lse.size(); ++i) {
      if (merge.want_lse[i] == -kInfinity) {
        ASSERT_EQ(lse[i], -kInfinity);
      } else {
        ASSERT_NEAR(lse[i], merge.want_lse[i], 1e-5 * std::max(1.0, std::abs(merge.want_lse[i])));
      }
    }
  }
}

TEST(LseScaleTest, ScaledPartsAddUpToTheMerge) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const Case merge(rng);
    std::vector<float> sum(merge.want.size());
    for (std::int32_t part = 0; part < merge.num_parts; ++part) {
      std::vector<float> out(
          merge.parts.begin() + part * static_cast<std::int64_t>(sum.size()),
          merge.parts.begin() + (part + 1) * static_cast<std::int64_t>(sum.size()));
      ASSERT_TRUE(LseScale({.out = out.data(),
                            .lse = merge.lse.data(),
                            .num_parts = merge.num_parts,
                            .part = part,
                            .num_rows = merge.num_rows,
                            .num_heads = merge.num_heads,
                            .head_dim = merge.head_dim},
                           stream)
                      .ok());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += out[i];
    }
    merge.ExpectRight(sum);
  }
}

// A weight that underflows is a weight of 0: NaN in that part stays there.
TEST(LseMergeTest, ZeroWeightContributesNothing) {
  CpuStream stream(1);
  const std::vector<float> parts = {std::nanf(""), 2.0F};
  const std::vector<float> lse = {-300.0F, 5.0F};
  float out = -7.0F;
  ASSERT_TRUE(LseMerge({.parts = parts.data(),
                        .lse = lse.data(),
                        .part_stride = 1,
                        .lse_stride = 1,
                        .out = &out,
                        .num_parts = 2,
                        .num_rows = 1,
                        .num_heads = 1,
                        .head_dim = 1},
                       stream)
                  .ok());
  EXPECT_EQ(out, 2.0F);
  float scaled = std::nanf("");
  ASSERT_TRUE(LseScale({.out = &scaled,
                        .lse = lse.data(),
                        .num_parts = 2,
                        .part = 0,
                        .num_rows = 1,
                        .num_heads = 1,
                        .head_dim = 1},
                       stream)
                  .ok());
  EXPECT_EQ(scaled, 0.0F);
}

// A part that cannot be told is not one without keys, whatever the others are.
TEST(LseMergeTest, ANanReachesItsHeadAlone) {
  CpuStream stream(1);
  const float empty = -std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  for (const std::vector<float>& bad : std::vector<std::vector<float>>{
           {nan, empty}, {empty, nan}, {nan, 1.0F}, {1.0F, nan}, {nan, nan}}) {
    SCOPED_TRACE(std::to_string(bad[0]) + " and " + std::to_string(bad[1]));
    const std::vector<float> parts = {1.0F, 2.0F, 3.0F, 4.0F};  // [part, head]
    const std::vector<float> lse = {bad[0], 0.5F, bad[1], empty};
    std::vector<float> out(2);
    std::vector<float> merged(2);
    ASSERT_TRUE(LseMerge({.parts = parts.data(),
                          .lse = lse.data(),
                          .part_stride = 2,
                          .lse_stride = 2,
                          .out = out.data(),
                          .merged_lse = merged.data(),
                          .num_parts = 2,
                          .num_rows = 1,
                          .num_heads = 2,
                          .head_dim = 1},
                         stream)
                    .ok());
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(merged[0]));
    EXPECT_EQ(out[1], 2.0F);
    EXPECT_EQ(merged[1], 0.5F);
    float sum = 0;
    for (std::int32_t part = 0; part < 2; ++part) {
      std::vector<float> scaled(parts.begin() + 2 * part, parts.begin() + 2 * part + 2);
      ASSERT_TRUE(LseScale({.out = scaled.data(),
                            .lse = lse.data(),
                            .num_parts = 2,
                            .part = part,
                            .num_rows = 1,
                            .num_heads = 2,
                            .head_dim = 1},
                           stream)
                      .ok());
      sum += scaled[0];
      EXPECT_EQ(scaled[1], part == 0 ? 2.0F : 0.0F);
    }
    EXPECT_TRUE(std::isnan(sum));
  }
}

}  // namespace
}  // namespace weft::kernels
