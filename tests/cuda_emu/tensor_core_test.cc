// The wrappers of PTX against the tables of the PTX manual ("Matrix Fragments for mma.m16n8k16",
// "ldmatrix"), which are written down here anew.

#include "kernels/cuda/tensor_core.h"

#include <array>
#include <cstring>

#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

struct Place {
  int row;
  int column;
};

// Elements a0 ... a7, b0 ... b3 and c0 ... c3 of a lane, as the manual has them.
Place PlaceOfA(int lane, int i) {
  const int group = lane >> 2;
  const int thread_in_group = lane % 4;
  const bool upper = (i >= 0 && i < 2) || (i >= 4 && i < 6);
  return {upper ? group : group + 8, thread_in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Place PlaceOfB(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane >> 2}; }
Place PlaceOfC(int lane, int i) {
  return {i < 2 ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (i & 1)};
}

template <typename T>
void CheckMma() {
  Rng rng(1);
  const auto a = RoundedFloats<T>(RandomFloats(rng, 16 * 16));
  const auto b = RoundedFloats<T>(RandomFloats(rng, 16 * 8));
  const auto c = RandomFloats(rng, 16 * 8);
  std::vector<float> got(16 * 8);
  const std::string error = cuda_emu::RunGrid(1, 32, 0, [&] {
    const auto lane = static_cast<int>(threadIdx.x);
    std::uint16_t values[8];
    Fragment4 of_a;
    for (int i = 0; i < 8; ++i)
      values[i] = Rounded<T>(a[PlaceOfA(lane, i).row * 16 + PlaceOfA(lane, i).column]).bits;
    std::memcpy(&of_a, values, sizeof(of_a));
    Fragment2 of_b;
    for (int i = 0; i < 4; ++i)
      values[i] = Rounded<T>(b[PlaceOfB(lane, i).row * 8 + PlaceOfB(lane, i).column]).bits;
    std::memcpy(&of_b, values, sizeof(of_b));
    Accumulator4 of_c;
    for (int i = 0; i < 4; ++i) of_c.c[i] = c[PlaceOfC(lane, i).row * 8 + PlaceOfC(lane, i).column];
    MmaM16N8K16<T>(of_a, of_b, of_c);
    for (int i = 0; i < 4; ++i)
      got[PlaceOfC(lane, i).row * 8 + PlaceOfC(lane, i).column] = of_c.c[i];
  });
  ASSERT_EQ(error, "");
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double want = c[row * 8 + column];
      for (int k = 0; k < 16; ++k) want += double{a[row * 16 + k]} * b[k * 8 + column];
      ASSERT_NEAR(got[row * 8 + column], want, 1e-5) << row << ", " << column;
    }
  }
}

TEST(TensorCoreTest, MmaIsThePtxManuals) {
  CheckMma<BFloat16>();
  CheckMma<Float16>();
}

template <bool kTransposed>
void CheckLdMatrix() {
  alignas(16) std::array<std::uint16_t, 4 * 8 * 8> matrices;
  for (std::size_t i = 0; i < matrices.size(); ++i) matrices[i] = static_cast<std::uint16_t>(i);
  const std::string error = cuda_emu::RunGrid(1, 32, 0, [&] {
    const auto lane = static_cast<int>(threadIdx.x);
    const Fragment4 got = LdMatrixX4<kTransposed>(matrices.data() + lane * 8);
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4;
        const int column = 2 * (lane % 4) + i;
        const int at = kTransposed ? column * 8 + row : row * 8 + column;
        EXPECT_EQ(got.r[matrix] >> 16 * i & 0xFFFF, static_cast<unsigned>(matrix * 64 + at));
      }
    }
  });
  ASSERT_EQ(error, "");
}

TEST(TensorCoreTest, LdMatrixIsThePtxManuals) {
  CheckLdMatrix<false>();
  CheckLdMatrix<true>();
}

// The count is of passes over the banks beyond the first: rows 128 bytes apart are all in one.
TEST(TensorCoreTest, ConflictsOfLdMatrixAreCounted) {
  alignas(128) static std::array<std::uint16_t, 32 * 64> rows;
  const auto conflicts = [&](auto place_of_lane) {
    cuda_emu::ResetCounters();
    EXPECT_EQ(cuda_emu::RunGrid(1, 32, 0,
                                [&] {
                                  const auto lane = static_cast<int>(threadIdx.x);
                                  LdMatrixX4<false>(rows.data() + place_of_lane(lane) * 8);
                                }),
              "");
    return cuda_emu::CountersOfThread().bank_conflicts;
  };
  EXPECT_EQ(conflicts([](int lane) { return lane * 8; }), 4 * 7);
  EXPECT_EQ(conflicts([](int lane) { return lane * 8 + lane / 4 % 2; }), 4 * 3);
  EXPECT_EQ(conflicts([](int lane) { return SwizzledChunk<128>(lane, 5); }), 0);
  EXPECT_EQ(conflicts([](int lane) { return lane; }), 0);
}

TEST(TensorCoreTest, PairsAreLowHalfFirst) {
  EXPECT_EQ(PairOf<BFloat16>(1.0F, -2.0F), 0xC0003F80U);
  EXPECT_EQ(PairOf<Float16>(1.0F, -2.0F), 0xC0003C00U);
}

}  // namespace
}  // namespace weft::kernels::cuda
