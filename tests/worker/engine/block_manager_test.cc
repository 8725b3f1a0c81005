#include "worker/engine/block_manager.h"

#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/worker/engine/block_index.h"

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

// Sequences that take, fill, store and give back blocks, beside a model that knows for each block
// what is in it and looks at all of them each time.
class CacheModel {
 public:
  explicit CacheModel(int seed)
      : random_(seed), blocks_(static_cast<std::int32_t>(2 + random_() % 30)) {}

  void Step() {
    const std::size_t at = sequences_.empty() ? 0 : random_() % sequences_.size();
    switch (random_() % 4) {
      case 0:
        if (sequences_.size() < 8) Start();
        break;
      case 1:
        if (!sequences_.empty()) StoreNext(sequences_[at]);
        break;
      case 2:
        if (!sequences_.empty()) Append(sequences_[at]);
        break;
      default:
        if (!sequences_.empty() && random_() % 3 == 0) {
          End(sequences_[at]);
          sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(at));
        }
    }
    CheckCounts();
  }
  void EndAll() {
    for (Sequence& sequence : sequences_) End(sequence);
    sequences_.clear();
    CheckCounts();
    EXPECT_EQ(blocks_.num_free(), blocks_.num_blocks());
  }
  std::uint64_t num_evictions() const { return blocks_.num_evictions(); }
  int num_merged() const { return num_merged_; }

 private:
  using Content = std::vector<std::int32_t>;  // all tokens up to the block's last
  struct Cached {
    BlockId id;
    std::int64_t given_back = 0;  // when nobody held it any more
  };
  struct Sequence {
    Content tokens;  // a block is one token
    std::vector<BlockHash> chain;
    std::vector<BlockRef> refs;
    std::size_t num_stored = 0;
  };

  Content Prefix(const Sequence& sequence, std::size_t length) const {
    return {sequence.tokens.begin(), sequence.tokens.begin() + static_cast<std::ptrdiff_t>(length)};
  }

  void Start() {
    Sequence sequence;
    for (std::size_t length = 1 + random_() % 6; length > 0; --length) {
      sequence.tokens.push_back(static_cast<std::int32_t>(random_() % 2));
    }
    sequence.chain = StartHashChain("", "");
    ExtendHashChain(sequence.tokens, 1, sequence.chain);
    std::int32_t num_cached = 0;
    std::int32_t num_unheld = 0;
    for (std::size_t i = 1; i <= sequence.tokens.size(); ++i) {
      const auto found = cached_.find(Prefix(sequence, i));
      if (found == cached_.end()) break;
      ++num_cached;
      num_unheld += holders_[found->second.id] == 0;
    }
    const BlockManager::CachedPrefix prefix =
        blocks_.FindPrefix(absl::MakeConstSpan(sequence.chain).subspan(1));
    ASSERT_EQ(prefix.num_blocks, num_cached);
    ASSERT_EQ(prefix.num_unheld, num_unheld);
    for (std::int32_t i = 1; i <= num_cached; ++i) {
      sequence.refs.push_back(blocks_.Share(sequence.chain[i]));
      const BlockId id = sequence.refs.back().id();
      ASSERT_EQ(id, cached_.at(Prefix(sequence, i)).id);
      ++holders_[id];
    }
    sequence.num_stored = num_cached;
    sequence.tokens.resize(num_cached);
    sequence.chain.resize(1 + num_cached);
    sequences_.push_back(std::move(sequence));
  }

  void Append(Sequence& sequence) {
    const std::optional<Content> evicted = Victim();
    const bool empty_left = static_cast<int>(cached_.size() + NumOwn()) < blocks_.num_blocks();
    std::optional<BlockRef> block = blocks_.Allocate();
    ASSERT_EQ(block.has_value(), empty_left || evicted.has_value());
    if (!block.has_value()) return;
    if (!empty_left) {
      ASSERT_EQ(block->id(), cached_.at(*evicted).id) << "not the least recently used leaf";
      cached_.erase(*evicted);
    }
    ASSERT_EQ(holders_[block->id()]++, 0);
    sequence.refs.push_back(*std::move(block));
    sequence.tokens.push_back(static_cast<std::int32_t>(random_() % 2));
    ExtendHashChain(sequence.tokens, 1, sequence.chain);
  }

  void StoreNext(Sequence& sequence) {
    const std::size_t i = sequence.num_stored;
    if (i == sequence.refs.size()) return;
    BlockRef& block = sequence.refs[i];
    const BlockId own = block.id();
    block = blocks_.Store(std::move(block), sequence.chain[1 + i],
                          i == 0 ? nullptr : &sequence.chain[i]);
    ++sequence.num_stored;
    const auto [entry, absent] = cached_.try_emplace(Prefix(sequence, i + 1), Cached{own});
    ASSERT_EQ(block.id(), entry->second.id);
    if (absent) return;
    ++num_merged_;
    --holders_[own];
    ++holders_[entry->second.id];
  }

  void End(Sequence& sequence) {
    for (std::size_t i = sequence.refs.size(); i-- > 0;) {
      const BlockId id = sequence.refs.back().id();
      sequence.refs.pop_back();
      ++now_;
      if (--holders_[id] == 0 && i < sequence.num_stored) {
        cached_.at(Prefix(sequence, i + 1)).given_back = now_;
      }
    }
  }

  // Whom an allocation would evict: of the cached that nobody holds and nothing follows, the one
  // given back first.
  std::optional<Content> Victim() {
    std::optional<Content> victim;
    for (auto at = cached_.begin(); at != cached_.end(); ++at) {
      const auto& [content, cached] = *at;
      // In the order of the map what follows a block comes right behind it.
      const auto next = std::next(at);
      const bool has_child = next != cached_.end() && next->first.size() > content.size() &&
                             std::equal(content.begin(), content.end(), next->first.begin());
      if (holders_[cached.id] > 0 || has_child) continue;
      if (!victim || cached.given_back < cached_.at(*victim).given_back) victim = content;
    }
    return victim;
  }

  std::size_t NumOwn() const {
    std::size_t own = 0;
    for (const Sequence& sequence : sequences_) own += sequence.refs.size() - sequence.num_stored;
    return own;
  }

  void CheckCounts() {
    std::set<BlockId> held;
    for (const Sequence& sequence : sequences_) {
      for (const BlockRef& ref : sequence.refs) held.insert(ref.id());
    }
    ASSERT_EQ(blocks_.num_free(), blocks_.num_blocks() - static_cast<int>(held.size()));
    ASSERT_EQ(blocks_.num_cached(), static_cast<int>(cached_.size()));
    index_.Apply(blocks_.TakeChanges());
    ASSERT_EQ(index_.size(), static_cast<int>(cached_.size()));
    if (random_() % 64 != 0) return;
    for (const auto& [content, cached] : cached_) {
      std::vector<BlockHash> chain = StartHashChain("", "");
      ExtendHashChain(content, 1, chain);
      ASSERT_TRUE(index_.Contains(chain.back()));
    }
  }

  std::mt19937 random_;
  BlockManager blocks_;
  BlockIndex index_;
  std::vector<Sequence> sequences_;
  std::map<Content, Cached> cached_;
  std::map<BlockId, int> holders_;
  std::int64_t now_ = 0;
  int num_merged_ = 0;
};

TEST(BlockManagerTest, CacheIsWhatAModelThatLooksAtAllBlocksSays) {
  for (int seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    CacheModel model(seed);
    for (int step = 0; step < 100'000; ++step) {
      model.Step();
      if (HasFatalFailure()) return;
    }
    model.EndAll();
    EXPECT_GT(model.num_evictions(), 1000u);
    EXPECT_GT(model.num_merged(), 100);
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
