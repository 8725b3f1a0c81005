#include "worker/block_log.h"

#include <random>

#include "gtest/gtest.h"
#include "tests/worker/engine/block_index.h"

namespace weft {
namespace {

BlockHash Hash(std::int32_t number) {
  BlockHash hash{};
  std::memcpy(hash.data(), &number, sizeof(number));
  return hash;
}

// Whoever reads, whenever: what he was told makes the index that all changes make, and is never
// longer than the cache.
TEST(BlockLogTest, ReadersOfAnyPaceHaveTheSameIndex) {
  for (int seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto num_blocks = static_cast<std::int32_t>(1 + random() % 20);
    BlockManager blocks(num_blocks);
    BlockLog log(num_blocks);
    BlockIndex truth;
    struct Reader {
      std::optional<std::uint64_t> seq;
      BlockIndex index;
      int snapshots = 0;
    };
    Reader readers[3];
    std::vector<BlockRef> held;  // a chain, until it is given back
    std::int32_t next = 0;
    for (int step = 0; step < 2000; ++step) {
      if (std::optional<BlockRef> block = blocks.Allocate(); block && random() % 8 != 0) {
        const BlockHash parent = Hash(next);
        held.push_back(
            blocks.Store(*std::move(block), Hash(++next), held.empty() ? nullptr : &parent));
      } else {
        while (!held.empty()) held.pop_back();
      }
      const absl::Span<const BlockChange> changes = blocks.TakeChanges();
      truth.Apply(changes);
      log.Append(changes);
      for (int i = 0; i < 3; ++i) {
        Reader& reader = readers[i];
        if (random() % (1 + 30 * i) != 0) continue;
        const BlockLog::News news = log.Read(reader.seq);
        EXPECT_LE(news.changes.size(), static_cast<std::size_t>(num_blocks));
        if (news.snapshot) {
          ++reader.snapshots;
          reader.index = BlockIndex();
        } else {
          EXPECT_EQ(news.seq, *reader.seq + news.changes.size());
        }
        reader.index.Apply(news.changes);
        reader.seq = news.seq;
        ASSERT_EQ(reader.index, truth);
      }
    }
    EXPECT_EQ(readers[0].snapshots, 1);
    EXPECT_GT(readers[2].snapshots, 1) << "the slow reader never had to start anew";
    while (!held.empty()) held.pop_back();
  }
}

}  // namespace
}  // namespace weft
