#include "router/prefix_index.h"

#include <map>
#include <random>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "router/prompt_blocks.h"

namespace weft {
namespace {

constexpr std::int32_t kBlockSize = 4;

std::vector<BlockHash> Blocks(const std::vector<std::int32_t>& ids, std::string_view salt = "") {
  PromptBlocks prompt(ids, salt);
  prompt.Hash("key", kBlockSize);
  const auto blocks = prompt.Find("key");
  return {blocks.begin(), blocks.end()};
}

void Add(v1::BlockChanges& changes, const BlockHash& hash, bool removed = false) {
  v1::BlockChange& change = *changes.add_changes();
  change.set_hash(std::string(hash.begin(), hash.end()));
  change.set_removed(removed);
}

TEST(PrefixIndexTest, CountsTheLeadingBlocksThatAreCached) {
  std::vector<std::int32_t> ids(18);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  const auto blocks = Blocks(ids);
  ASSERT_EQ(blocks.size(), 4U);  // the last one is not full
  PrefixIndex index;
  v1::BlockChanges changes;
  changes.set_snapshot(true);
  for (std::size_t n = 0; n <= blocks.size(); ++n) {
    EXPECT_TRUE(index.Apply(changes));
    EXPECT_EQ(index.CountCached(blocks), n);
    EXPECT_EQ(index.size(), n);
    if (n < blocks.size()) Add(changes, blocks[n]);
  }
  EXPECT_EQ(index.CountCached({}), 0U);
  EXPECT_EQ(index.CountCached(Blocks(ids, "another tenant")), 0U);
  ids[5] = 99;  // in the second block: what follows has other hashes, too
  EXPECT_EQ(index.CountCached(Blocks(ids)), 1U);
}

TEST(PrefixIndexTest, FollowsNumberedChangesAndForgetsAllAtAGap) {
  const auto blocks = Blocks({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  PrefixIndex index;
  v1::BlockChanges first;
  Add(first, blocks[0]);
  first.set_seq(1);
  EXPECT_FALSE(index.Apply(first)) << "no snapshot yet";

  v1::BlockChanges snapshot;
  snapshot.set_snapshot(true);
  snapshot.set_seq(10);
  Add(snapshot, blocks[0]);
  EXPECT_TRUE(index.Apply(snapshot));

  v1::BlockChanges changes;
  Add(changes, blocks[1]);
  Add(changes, blocks[2]);
  changes.set_seq(12);
  EXPECT_TRUE(index.Apply(changes));
  EXPECT_EQ(index.CountCached(blocks), 3U);

  v1::BlockChanges removal;
  Add(removal, blocks[2], /*removed=*/true);
  removal.set_seq(13);
  EXPECT_TRUE(index.Apply(removal));
  EXPECT_EQ(index.CountCached(blocks), 2U);

  removal.set_seq(15);
  EXPECT_FALSE(index.Apply(removal));
  EXPECT_EQ(index.CountCached(blocks), 0U);
  removal.set_seq(16);
  EXPECT_FALSE(index.Apply(removal)) << "nothing but a snapshot helps";
  EXPECT_TRUE(index.Apply(snapshot));
  EXPECT_EQ(index.CountCached(blocks), 1U);
}

TEST(PrefixIndexTest, HoldsNoMoreThanTheGroupDoes) {
  std::mt19937_64 random(3);
  PrefixIndex index;
  std::vector<BlockHash> held;
  v1::BlockChanges changes;
  changes.set_snapshot(true);
  ASSERT_TRUE(index.Apply(changes));
  std::uint64_t seq = 0;
  for (int i = 0; i < 200'000; ++i) {  // a cache of 1,000 blocks that is full, over and over
    v1::BlockChanges change;
    if (held.size() == 1000) {
      std::swap(held[random() % held.size()], held.back());
      Add(change, held.back(), /*removed=*/true);
      held.pop_back();
    } else {
      BlockHash hash;
      for (std::uint8_t& byte : hash) byte = static_cast<std::uint8_t>(random());
      Add(change, hash);
      held.push_back(hash);
    }
    change.set_seq(++seq);
    ASSERT_TRUE(index.Apply(change));
    ASSERT_EQ(index.size(), held.size());
  }
  EXPECT_LE(index.bytes(), 40 * 1000U);
}

TEST(PrefixIndexTest, WhatIsNoHashEmptiesIt) {
  PrefixIndex index;
  v1::BlockChanges changes;
  changes.set_snapshot(true);
  changes.add_changes()->set_hash("short");
  EXPECT_FALSE(index.Apply(changes));
  EXPECT_EQ(index.size(), 0U);
}

}  // namespace
}  // namespace weft
