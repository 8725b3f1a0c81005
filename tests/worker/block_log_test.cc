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

// Whoever reads, whenever, in parts of any size: once he has all, what he was told makes the index
// that all changes make.
TEST(BlockLogTest, ReadersOfAnyPaceHaveTheSameIndex) {
  for (int seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto num_blocks = static_cast<std::int32_t>(1 + random() % 20);
    BlockManager blocks(num_blocks);
    BlockLog log(num_blocks);
    BlockIndex truth;
    struct Reader {
      BlockLog::Reader place;
      std::optional<std::uint64_t> seq;
      BlockIndex index;
      int snapshots = 0;
    };
    const std::size_t max_changes = 1 + random() % 30;
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
        // The last one takes a part at a time, while changes go on.
        for (bool all = false; !all; all |= i == 2) {
          const BlockLog::News news = reader.place.Next(log, max_changes);
          EXPECT_LE(news.changes.size(), max_changes);
          if (news.snapshot) {
            ++reader.snapshots;
            reader.index = BlockIndex();
          } else {
            EXPECT_EQ(news.seq, *reader.seq + news.changes.size());
            if (news.changes.empty()) {
              all = true;
              ASSERT_EQ(reader.index, truth);
            }
          }
          reader.index.Apply(news.changes);
          reader.seq = news.seq;
        }
      }
    }
    EXPECT_EQ(readers[0].snapshots, 1);
    EXPECT_GT(readers[2].snapshots, 1) << "the slow reader never had to start anew";
    while (!held.empty()) held.pop_back();
  }
}

}  // namespace
}  // namespace weft
