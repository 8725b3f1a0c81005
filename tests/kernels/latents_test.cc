#include "kernels/latents.h"

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "kernels/attention.h"
#include "kernels/device/stream.h"

namespace weft::kernels {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Whole numbers up to 256 survive every storage type.
float ValueAt(std::int64_t entry, int dim) {
  return static_cast<float>((entry * 31 + dim * 7) % 257) - 128;
}

TEST(ReadLatentsTest, GivesBackWhatKvAppendStored) {
  std::mt19937 rng(1);
  CpuStream stream(2);
  for (int block : {1, 5, 16, 24, 64}) {
    for (int dim : {8, 40, 576}) {
      for (DType dtype : kDTypes) {
        SCOPED_TRACE(fmt::format("{} tokens a block, {} dims, {}", block, dim, DTypeName(dtype)));
        constexpr int kBlocks = 4;
        const int entries = kBlocks * block - block / 3;
        std::vector<std::int32_t> table = {6, 1, 5, 3};
        // What nobody stored is 0xFF bytes, a NaN.
        std::vector<std::byte> cache(std::size_t{7} * block * dim * DTypeBytes(dtype),
                                     std::byte{0xFF});
        std::vector<float> rows;
        std::vector<std::int64_t> slots;
        for (int entry = 0; entry < entries; ++entry) {
          for (int d = 0; d < dim; ++d) rows.push_back(ValueAt(entry, d));
          slots.push_back(std::int64_t{table[entry / block]} * block + entry % block);
        }
        ASSERT_TRUE(KvAppend({.k = rows.data(),
                              .v = nullptr,
                              .slots = slots.data(),
                              .k_blocks = cache.data(),
                              .v_blocks = nullptr,
                              .num_rows = entries,
                              .num_kv_heads = 1,
                              .head_dim = dim,
                              .block_tokens_per_rank = block,
                              .kv_stride = dim,
                              .kv_dtype = dtype},
                             stream)
                        .ok());
        for (int draw = 0; draw < 10; ++draw) {
          const int begin = static_cast<int>(rng() % entries);
          const int count = static_cast<int>(rng() % (entries - begin + 1));
          std::vector<float> out(std::size_t(count) * dim + 1, 99);
          ASSERT_TRUE(ReadLatents({.k_blocks = cache.data(),
                                   .block_table = table.data(),
                                   .out = out.data(),
                                   .begin = begin,
                                   .num_tokens = count,
                                   .head_dim = dim,
                                   .block_tokens_per_rank = block,
                                   .kv_dtype = dtype},
                                  stream)
                          .ok());
          for (int i = 0; i < count; ++i) {
            for (int d = 0; d < dim; ++d) {
              ASSERT_EQ(out[std::size_t(i) * dim + d], ValueAt(begin + i, d))
                  << "entry " << begin + i << " dim " << d;
            }
          }
          EXPECT_EQ(out.back(), 99);
        }
      }
    }
  }
}

TEST(CopyColumnsTest, CopiesHeadsBetweenStridesAndNothingElse) {
  CpuStream stream(2);
  constexpr int kRows = 50, kHeads = 3, kSize = 5, kIn = 23, kOutHead = 7, kOut = 29;
  std::vector<float> in(kRows * kIn);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  for (int in_head : {6, 0}) {
    std::vector<float> out(kRows * kOut, -1);
    ASSERT_TRUE(CopyColumns({.in = in.data(),
                             .out = out.data(),
                             .num_rows = kRows,
                             .num_heads = kHeads,
                             .size = kSize,
                             .in_row_stride = kIn,
                             .in_head_stride = in_head,
                             .out_row_stride = kOut,
                             .out_head_stride = kOutHead},
                            stream)
                    .ok());
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kOut; ++column) {
        const int head = column / kOutHead;
        const int at = column % kOutHead;
        const bool copied = head < kHeads && at < kSize;
        EXPECT_EQ(out[row * kOut + column], copied ? in[row * kIn + head * in_head + at] : -1.0F)
            << "row " << row << " column " << column << " head stride " << in_head;
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels
