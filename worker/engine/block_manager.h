#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/base/check.h"
#include "server/block_hash.h"
#include "worker/engine/step_plan.h"

namespace weft {

class BlockManager;

// Holds a block, maybe together with others; gives it back when it goes. The only way to hold a
// block, so none can leak or be freed twice.
class BlockRef {
 public:
  BlockRef(BlockRef&& other) noexcept
      : manager_(std::exchange(other.manager_, nullptr)), id_(other.id_) {}
  BlockRef& operator=(BlockRef&& other) noexcept {
    std::swap(manager_, other.manager_);
    std::swap(id_, other.id_);
    return *this;
  }
  inline ~BlockRef();

  BlockId id() const { return id_; }

 private:
  friend class BlockManager;
  BlockRef(BlockManager& manager, BlockId id) : manager_(&manager), id_(id) {}

  BlockManager* manager_;  // null once moved from
  BlockId id_;
};

// News of what the prefix cache holds.
struct BlockChange {
  BlockHash hash;
  std::optional<BlockHash> parent;  // of the block before; nothing for a sequence's first
  bool removed = false;             // else stored
};

// The KV blocks of a group: which are held, and which are found by the hash of what is in them, the
// prefix cache.
//
// A block that was stored under its hash is never written again, and may be held by any number of
// sequences. When the last one gives it back, it stays in the cache until Allocate() needs it: the
// one that was given back first goes first. Two rules make that the least recently used leaf, and
// the cache closed under "the block before": whoever holds a block of the cache holds all before it
// in the sequence, too, and gives them back after it.
//
// When a block may be reused: at once, by any later plan. Every rank runs steps in order, so the
// writes of a step in flight into a block that was freed meanwhile land before its next owner's,
// and what it writes into a block that was stored meanwhile is there before anybody reads it. Only
// within one plan must a block that is written not have two holders, and that is the scheduler's to
// keep.
//
// One thread. Outlives its BlockRefs. Allocates nothing after construction but for news that nobody
// takes.
class BlockManager {
 public:
  explicit BlockManager(std::int32_t num_blocks);
  ~BlockManager();
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;

  // A block that nobody holds and that no hash finds any more. Nothing when all blocks are held.
  std::optional<BlockRef> Allocate();

  // Puts a full block under its hash and returns it; when there is one of that hash already, gives
  // `block` back and returns that one. `parent` is the hash of the block before, which the caller
  // holds; null for a sequence's first.
  BlockRef Store(BlockRef block, const BlockHash& hash, const BlockHash* parent);

  // What is there of a sequence whose full blocks have these hashes: how many of the first blocks
  // are cached, and how many of these nobody holds. Logarithmic in their number.
  struct CachedPrefix {
    std::int32_t num_blocks = 0;
    std::int32_t num_unheld = 0;  // num_free() counts them as well
  };
  CachedPrefix FindPrefix(absl::Span<const BlockHash> hashes) const;
  // A cached block.
  BlockRef Share(const BlockHash& hash);

  // Empties the prefix cache, leaves first: no hash finds a block any more, held or not. Sequences
  // that hold blocks store nothing more.
  void ForgetAll();

  // What Store() and Allocate() have changed since the last call, in order. The span is valid until
  // the next call of any method.
  absl::Span<const BlockChange> TakeChanges();

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()); }
  // That Allocate() can give: those that nobody holds.
  std::int32_t num_free() const { return static_cast<std::int32_t>(empty_.size()) + num_unheld_; }
  std::int32_t num_cached() const { return static_cast<std::int32_t>(by_hash_.size()); }
  std::uint64_t num_evictions() const { return num_evictions_; }

 private:
  friend class BlockRef;
  struct Block {
    std::int32_t num_holders = 0;
    bool cached = false;
    BlockHash hash;          // while cached
    std::int32_t depth = 0;  // likewise: blocks before it in its sequences
    // In the list of those that are cached and not held.
    std::int32_t previous = 0;
    std::int32_t next = 0;
  };

  Block& At(BlockId id) { return blocks_[static_cast<std::int32_t>(id)]; }
  void GiveBack(BlockId id);
  void PushUnheld(BlockId id);
  void RemoveUnheld(BlockId id);

  std::vector<Block> blocks_;   // [num_blocks]
  std::vector<BlockId> empty_;  // the last one freed is taken first: it is the one still in caches
  absl::flat_hash_map<BlockHash, BlockId, BlockHashBits> by_hash_;
  // Cached and not held, from the one given back first: a list over `blocks_`; -1 is none.
  std::int32_t first_unheld_ = -1;
  std::int32_t last_unheld_ = -1;
  std::int32_t num_unheld_ = 0;
  std::uint64_t num_evictions_ = 0;
  std::vector<BlockChange> changes_;
  std::vector<BlockChange> taken_changes_;
};

inline BlockRef::~BlockRef() {
  if (manager_ != nullptr) manager_->GiveBack(id_);
}

}  // namespace weft
