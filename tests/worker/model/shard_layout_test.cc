#include "worker/model/shard_layout.h"

#include <string>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<ShardLayout> Make(std::int32_t tp, std::int32_t dcp,
                                 std::optional<std::int32_t> block_size,
                                 std::optional<std::int32_t> interleave, std::int32_t rank = 0,
                                 HeadCounts heads = {.num_q_heads = 64, .num_kv_heads = 1}) {
  return ShardLayout::Create({.tensor_parallel_size = tp,
                              .decode_context_parallel_size = dcp,
                              .block_size = block_size,
                              .interleave = interleave},
                             heads, rank);
}

std::string ErrorOf(const absl::StatusOr<ShardLayout>& layout) {
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(layout.status().message());
}

// What the rule says, position by position: turns of I consecutive positions go round the ranks.
struct Dealt {
  std::vector<std::int32_t> owner;                    // of each position
  std::vector<std::vector<std::int64_t>> positions;   // of each rank, ascending
  std::vector<std::vector<std::int64_t>> num_before;  // [rank][L]: owned among the first L
};

Dealt Deal(std::int32_t dcp, std::int32_t interleave, std::int64_t num_positions) {
  Dealt dealt{.positions = std::vector<std::vector<std::int64_t>>(dcp),
              .num_before = std::vector<std::vector<std::int64_t>>(dcp)};
  std::int32_t rank = 0;
  std::int32_t given = 0;
  for (std::int64_t p = 0; p <= num_positions; ++p) {
    for (std::int32_t r = 0; r < dcp; ++r) {
      dealt.num_before[r].push_back(static_cast<std::int64_t>(dealt.positions[r].size()));
    }
    dealt.owner.push_back(rank);
    dealt.positions[rank].push_back(p);
    if (++given == interleave) {
      given = 0;
      rank = (rank + 1) % dcp;
    }
  }
  return dealt;
}

// Every method that takes a position or a length, on rank `r`, over [0, num_positions).
void CheckAgainst(const Dealt& dealt, const ShardLayout& layout, std::int64_t num_positions) {
  const std::int32_t r = layout.dcp_rank();
  std::int64_t local = 0;
  for (std::int64_t p = 0; p < num_positions; ++p) {
    ASSERT_EQ(layout.OwnerDcpRank(p), dealt.owner[p]);
    ASSERT_EQ(layout.Owns(p), dealt.owner[p] == r);
    ASSERT_EQ(layout.LocalLength(p), dealt.num_before[r][p]);
    if (!layout.Owns(p)) continue;
    ASSERT_EQ(layout.PositionOf(local), p);
    // A block's local part is B consecutive local entries: local index = block * B + offset.
    ASSERT_EQ(layout.BlockIndex(p) * layout.block_tokens_per_rank() + layout.OffsetInBlock(p),
              local);
    ASSERT_LT(layout.OffsetInBlock(p), layout.block_tokens_per_rank());
    ++local;
  }
}

struct Geometry {
  std::int32_t dcp;
  std::int32_t block_size;
  std::int32_t interleave;
};

std::vector<Geometry> SmallGeometries() {
  std::vector<Geometry> all;
  for (std::int32_t dcp : {1, 2, 3, 4, 8}) {
    for (std::int32_t per_rank : {1, 2, 4, 8, 12, 16}) {
      for (std::int32_t interleave : {1, 2, 4, per_rank}) {
        if (per_rank % interleave == 0) all.push_back({dcp, per_rank * dcp, interleave});
      }
    }
  }
  return all;
}

TEST(ShardLayoutTest, GeometryEqualsDealingPositionsOutOneByOne) {
  for (const Geometry& g : SmallGeometries()) {
    const std::int64_t n = 3 * g.block_size + 1;
    const Dealt dealt = Deal(g.dcp, g.interleave, n);
    for (std::int32_t rank = 0; rank < 2 * g.dcp; ++rank) {  // two DCP groups
      SCOPED_TRACE(fmt::format("N={} V={} I={} rank={}", g.dcp, g.block_size, g.interleave, rank));
      const auto layout = Make(2 * g.dcp, g.dcp, g.block_size, g.interleave, rank);
      ASSERT_TRUE(layout.ok()) << layout.status();
      ASSERT_EQ(layout->block_size(), g.block_size);
      ASSERT_EQ(layout->dcp_rank(), rank % g.dcp);
      ASSERT_EQ(layout->dcp_group(), rank / g.dcp);
      CheckAgainst(dealt, *layout, n);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ShardLayoutTest, LocalLengthsSumToTheLengthAndRankZeroHasTheMost) {
  for (const Geometry& g : SmallGeometries()) {
    const auto layout = Make(g.dcp, g.dcp, g.block_size, g.interleave);
    ASSERT_TRUE(layout.ok()) << layout.status();
    auto check = [&](std::int64_t length) {
      std::int64_t sum = 0;
      for (std::int32_t r = 0; r < g.dcp; ++r) {
        sum += layout->LocalLength(length, r);
        ASSERT_LE(layout->LocalLength(length, r), layout->LocalLength(length, 0));
      }
      ASSERT_EQ(sum, length) << "N=" << g.dcp << " V=" << g.block_size << " I=" << g.interleave;
    };
    for (std::int64_t length = 0; length <= 3 * g.block_size + 1; ++length) check(length);
    const std::int64_t far = std::int64_t{1} << 20;
    for (std::int64_t length = far - g.block_size; length <= far + g.block_size; ++length) {
      check(length);
    }
    for (std::int64_t length = far << 20; length < (far << 20) + 40; ++length) check(length);
  }
}

TEST(ShardLayoutTest, GeometryHoldsNearAMillionPositions) {
  const std::int64_t n = (1 << 20) + 100;
  for (const Geometry& g : {Geometry{2, 128, 16}, Geometry{3, 48, 4}, Geometry{8, 128, 1}}) {
    const Dealt dealt = Deal(g.dcp, g.interleave, n);
    for (std::int32_t rank = 0; rank < g.dcp; ++rank) {
      SCOPED_TRACE(fmt::format("N={} V={} I={} rank={}", g.dcp, g.block_size, g.interleave, rank));
      const auto layout = Make(g.dcp, g.dcp, g.block_size, g.interleave, rank);
      ASSERT_TRUE(layout.ok()) << layout.status();
      CheckAgainst(dealt, *layout, n);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ShardLayoutTest, AQueryAtAPositionSeesExactlyTheOwnedPositionsUpToIt) {
  const std::int64_t n = 100;
  const Dealt dealt = Deal(3, 4, n);
  for (std::int32_t rank = 0; rank < 3; ++rank) {
    const auto layout = Make(3, 3, 24, 4, rank);
    ASSERT_TRUE(layout.ok()) << layout.status();
    for (std::int64_t p = 0; p < n; ++p) {
      const std::int64_t visible = layout->LocalLength(p + 1);
      if (visible > 0) {
        ASSERT_LE(layout->PositionOf(visible - 1), p);
      }
      ASSERT_GT(layout->PositionOf(visible), p);
    }
  }
}

// Law 1 over all T <= 16, Hkv <= 16, g <= 16 and every N that divides T.
TEST(ShardLayoutTest, EveryQueryHeadFindsItsKvHeadInItsGroupAndHeadsTile) {
  for (std::int32_t kv = 1; kv <= 16; ++kv) {
    for (std::int32_t g = 1; g <= 16; ++g) {
      const HeadCounts heads{.num_q_heads = kv * g, .num_kv_heads = kv};
      for (std::int32_t tp = 1; tp <= std::min(16, heads.num_q_heads); ++tp) {
        for (std::int32_t dcp = 1; dcp <= tp; ++dcp) {
          if (tp % dcp != 0) continue;
          std::int32_t next_q = 0;
          std::int64_t stored = 0;
          double copies = 0;
          for (std::int32_t rank = 0; rank < tp; ++rank) {
            const auto layout = Make(tp, dcp, std::nullopt, std::nullopt, rank, heads);
            ASSERT_TRUE(layout.ok()) << layout.status();
            const IndexRange q = layout->QHeads();
            ASSERT_EQ(q.begin, next_q);
            ASSERT_EQ(q.begin, rank * heads.num_q_heads / tp);
            ASSERT_GE(q.size(), 1);
            ASSERT_LE(q.size(), layout->PaddedQHeads());
            ASSERT_GE(q.size(), layout->PaddedQHeads() - 1);
            next_q = q.end;
            const IndexRange group_q = layout->GroupQHeads();
            ASSERT_TRUE(group_q.begin <= q.begin && q.end <= group_q.end);
            ASSERT_EQ(group_q, (IndexRange{layout->QHeads(rank / dcp * dcp).begin,
                                           layout->QHeads(rank / dcp * dcp + dcp - 1).end}));
            // Exactly the KV heads that some query head of the group reads.
            const IndexRange group_kv = layout->GroupKvHeads();
            ASSERT_EQ(group_kv.begin, group_q.begin / g);
            ASSERT_EQ(group_kv.end, (group_q.end - 1) / g + 1);
            // Where groups and KV heads divide, a group's part has whole KV heads, or lies in one:
            // "the first ranks get one more" stores extra ones (9 heads on 3, T = 6, N = 2).
            const std::int32_t groups = tp / dcp;
            if (kv % groups == 0) {
              ASSERT_EQ(group_kv.size(), kv / groups);
            }
            if (groups % kv == 0) {
              ASSERT_EQ(group_kv.size(), 1);
            }
            for (std::int32_t h = q.begin; h < q.end; ++h) {
              ASSERT_TRUE(group_kv.begin <= h / g && h / g < group_kv.end)
                  << "Hq=" << heads.num_q_heads << " Hkv=" << kv << " T=" << tp << " N=" << dcp;
            }
            if (rank % dcp == 0) stored += group_kv.size();
            copies = layout->KvCopies();
          }
          ASSERT_EQ(next_q, heads.num_q_heads);
          ASSERT_DOUBLE_EQ(copies, static_cast<double>(stored) / kv);
        }
      }
    }
  }
}

TEST(ShardLayoutTest, SlicesTileEveryDimension) {
  for (std::int32_t tp = 1; tp <= 16; ++tp) {
    for (std::int32_t size : {0, 1, 2, 3, 7, 15, 16, 17, 160, 1536, 49152, 128256, 2147483647}) {
      std::int32_t next = 0;
      for (std::int32_t rank = 0; rank < tp; ++rank) {
        const auto layout = Make(tp, 1, std::nullopt, std::nullopt, rank);
        ASSERT_TRUE(layout.ok()) << layout.status();
        const IndexRange slice = layout->Slice(size);
        ASSERT_EQ(slice, layout->Slice(size, rank));
        ASSERT_EQ(slice.begin, next);
        ASSERT_GE(slice.size(), size / tp);
        ASSERT_LE(slice.size() - 1, size / tp);
        next = slice.end;
      }
      ASSERT_EQ(next, size);
    }
  }
}

TEST(ShardLayoutTest, KvCopiesOfKnownModels) {
  // Llama-3.1-8B: 32 query and 8 KV heads; DeepSeek: 128 heads on one latent.
  const HeadCounts llama{.num_q_heads = 32, .num_kv_heads = 8};
  const HeadCounts mla{.num_q_heads = 128, .num_kv_heads = 1};
  EXPECT_EQ(Make(8, 1, {}, {}, 0, llama)->KvCopies(), 1.0);
  EXPECT_EQ(Make(16, 1, {}, {}, 0, llama)->KvCopies(), 2.0);
  EXPECT_EQ(Make(16, 2, {}, {}, 0, llama)->KvCopies(), 1.0);
  EXPECT_EQ(Make(8, 1, {}, {}, 0, mla)->KvCopies(), 8.0);
  EXPECT_EQ(Make(8, 4, {}, {}, 0, mla)->KvCopies(), 2.0);
  EXPECT_EQ(Make(8, 8, {}, {}, 0, mla)->KvCopies(), 1.0);
  // 9 query heads of 3 KV heads on 2 ranks: 4 + 5 heads read {0, 1} and {1, 2}.
  EXPECT_EQ(Make(2, 1, {}, {}, 0, {.num_q_heads = 9, .num_kv_heads = 3})->KvCopies(), 4.0 / 3);
}

TEST(ShardLayoutTest, DefaultsFollowTheBlockRule) {
  auto expect = [](const absl::StatusOr<ShardLayout>& layout, std::int32_t block_size,
                   std::int32_t interleave) {
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(layout->block_size(), block_size);
    EXPECT_EQ(layout->interleave(), interleave);
  };
  expect(Make(1, 1, {}, {}), 128, 16);
  expect(Make(2, 2, {}, {}), 128, 16);
  expect(Make(3, 3, {}, {}), 144, 16);
  expect(Make(8, 8, {}, {}), 128, 16);
  expect(Make(16, 16, {}, {}), 256, 16);
  expect(Make(2, 2, {}, 128), 256, 128);  // as design.md has it
  expect(Make(2, 2, {}, 1), 128, 1);
  expect(Make(3, 3, {}, 5), 135, 5);
  expect(Make(2, 2, 48, {}), 48, 12);  // B = 24
  expect(Make(2, 2, 8, {}), 8, 4);
  expect(Make(2, 2, 34, {}), 34, 1);  // B = 17
  expect(Make(2, 2, 2, {}), 2, 1);
  const auto cuda = ShardLayout::Create(
      {.tensor_parallel_size = 2, .decode_context_parallel_size = 2, .min_block_size = 256},
      {.num_q_heads = 8, .num_kv_heads = 1}, 0);
  expect(cuda, 256, 16);
}

TEST(ShardLayoutTest, OneDcpRankAcceptsAnyInterleaveAndIgnoresIt) {
  for (std::int32_t interleave : {1, 3, 7, 16, 128, 1000, 2147483647}) {
    for (std::optional<std::int32_t> block_size : {std::optional<std::int32_t>(), {48}, {7}}) {
      const auto layout = Make(2, 1, block_size, interleave, 1);
      ASSERT_TRUE(layout.ok()) << layout.status();
      EXPECT_EQ(layout->block_size(), block_size.value_or(128));
      CheckAgainst(Deal(1, 1, 400), *layout, 400);
    }
  }
}

TEST(ShardLayoutTest, AcceptsABlockSizeExactlyWhenTheRuleDoes) {
  for (std::int32_t dcp : {2, 3, 4}) {
    for (std::int32_t block_size = 1; block_size <= 100; ++block_size) {
      EXPECT_EQ(Make(dcp, dcp, block_size, {}).ok(), block_size % dcp == 0);
      for (std::int32_t interleave = 1; interleave <= 40; ++interleave) {
        EXPECT_EQ(Make(dcp, dcp, block_size, interleave).ok(),
                  block_size % (dcp * interleave) == 0);
      }
    }
  }
}

TEST(ShardLayoutTest, ARefusedBlockSizeNamesTheNearestThatWork) {
  EXPECT_THAT(ErrorOf(Make(2, 2, 100, 16)),
              AllOf(HasSubstr("100"), HasSubstr("96 or 128"), HasSubstr("interleave that works"),
                    HasSubstr("is 10")));
  EXPECT_THAT(ErrorOf(Make(3, 3, 128, 16)), AllOf(HasSubstr("96 or 144")));
  EXPECT_THAT(ErrorOf(Make(3, 3, 128, {})), AllOf(HasSubstr("126 or 129")));
  EXPECT_THAT(ErrorOf(Make(2, 2, 16, 16)), AllOf(HasSubstr("work: 32"), HasSubstr("is 8")));
  EXPECT_THAT(ErrorOf(Make(2, 2, 16, 2147483647)), HasSubstr("is 8"));
  // What a message names must itself be accepted.
  EXPECT_TRUE(Make(2, 2, 96, 16).ok());
  EXPECT_TRUE(Make(2, 2, 128, 16).ok());
  EXPECT_TRUE(Make(2, 2, 100, 10).ok());
  EXPECT_TRUE(Make(3, 3, 144, 16).ok());
  EXPECT_TRUE(Make(2, 2, 16, 8).ok());
}

TEST(ShardLayoutTest, SizesOutOfRangeAreRefusedWithWhatIsAllowed) {
  const HeadCounts nine{.num_q_heads = 9, .num_kv_heads = 3};
  EXPECT_THAT(ErrorOf(Make(4, 3, {}, {})),
              AllOf(HasSubstr("decode-context-parallel-size is 3"), HasSubstr("1, 2, 4")));
  EXPECT_THAT(ErrorOf(Make(10, 1, {}, {}, 0, nine)),
              AllOf(HasSubstr("tensor-parallel-size is 10"), HasSubstr("at most 9")));
  EXPECT_TRUE(Make(9, 9, {}, {}, 8, nine).ok());
  EXPECT_THAT(ErrorOf(Make(0, 1, {}, {})), HasSubstr("tensor-parallel-size is 0"));
  EXPECT_THAT(ErrorOf(Make(1, -1, {}, {})), HasSubstr("decode-context-parallel-size is -1"));
  EXPECT_THAT(ErrorOf(Make(2, 2, 0, {})), HasSubstr("block-size is 0"));
  EXPECT_THAT(ErrorOf(Make(2, 2, {}, 0)), HasSubstr("interleave-size is 0"));
  EXPECT_THAT(ErrorOf(Make(1, 1, {}, -5)), HasSubstr("interleave-size is -5"));
  EXPECT_THAT(ErrorOf(Make(2, 2, 2097152, {})), HasSubstr("at most 1048576"));
  EXPECT_TRUE(Make(2, 2, 1048576, {}).ok());
  EXPECT_THAT(ErrorOf(Make(2, 2, {}, 2147483647)), HasSubstr("4294967294"));
  EXPECT_THAT(ErrorOf(Make(2, 2, {}, {}, 2)), HasSubstr("rank is 2"));
  EXPECT_THAT(ErrorOf(Make(2, 2, {}, {}, -1)), HasSubstr("rank is -1"));
  EXPECT_THAT(ErrorOf(Make(1, 1, {}, {}, 0, {.num_q_heads = 8, .num_kv_heads = 3})),
              HasSubstr("num_key_value_heads is 3"));
}

}  // namespace
}  // namespace weft
