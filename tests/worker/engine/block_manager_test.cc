#include "worker/engine/block_manager.h"

#include <random>
#include <set>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(BlockManagerTest, EveryBlockIsGivenOnceAndComesBack) {
  BlockManager blocks(5);
  {
    std::set<BlockId> ids;
    std::vector<BlockRef> held;
    while (std::optional<BlockRef> block = blocks.Allocate()) {
      EXPECT_TRUE(ids.insert(block->id()).second);
      held.push_back(*std::move(block));
    }
    EXPECT_EQ(ids.size(), 5u);
    EXPECT_EQ(*ids.begin(), BlockId{0});
    EXPECT_EQ(*ids.rbegin(), BlockId{4});
    EXPECT_EQ(blocks.num_free(), 0);
  }
  EXPECT_EQ(blocks.num_free(), 5);
}

TEST(BlockManagerTest, AMovedBlockHasOneOwner) {
  BlockManager blocks(2);
  std::optional<BlockRef> first = blocks.Allocate();
  const BlockId id = first->id();
  BlockRef second = *std::move(first);
  first.reset();
  EXPECT_EQ(second.id(), id);
  EXPECT_EQ(blocks.num_free(), 1);
  {
    BlockRef third = *blocks.Allocate();
    third = std::move(second);
    EXPECT_EQ(third.id(), id);
  }
  EXPECT_EQ(blocks.num_free(), 1);  // `second` holds what `third` had
}

TEST(BlockManagerTest, NoBlockHasTwoOwnersInRandomTraces) {
  for (int seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    BlockManager blocks(1 + random() % 20);
    std::vector<BlockRef> held;
    for (int step = 0; step < 200; ++step) {
      if (random() % 2 == 0) {
        std::optional<BlockRef> block = blocks.Allocate();
        ASSERT_EQ(block.has_value(), static_cast<int>(held.size()) < blocks.num_blocks());
        if (block.has_value()) held.push_back(*std::move(block));
      } else if (!held.empty()) {
        held.erase(held.begin() + random() % held.size());
      }
      std::set<BlockId> ids;
      for (const BlockRef& block : held) ASSERT_TRUE(ids.insert(block.id()).second);
      ASSERT_EQ(blocks.num_free() + static_cast<int>(held.size()), blocks.num_blocks());
    }
  }
}

TEST(BlockManagerDeathTest, AForgottenBlockIsNoticed) {
  EXPECT_DEATH(
      {
        std::optional<BlockRef> held;
        BlockManager blocks(1);
        held = blocks.Allocate();
      },
      "a BlockRef is still held");
}

}  // namespace
}  // namespace weft
