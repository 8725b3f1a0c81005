#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/base/check.h"
#include "worker/engine/step_plan.h"

namespace weft {

class BlockManager;

// Holds one block; gives it back when it goes. The only way to own a block, so none can leak or be
// freed twice.
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

// The KV blocks of a group: which are free. Knows nothing of what is in them.
//
// When a block may be reused: at once, by any later plan. Every rank runs steps in order, so the
// writes of a step in flight into a block that was freed meanwhile land before its next owner's.
// Only within one plan must a block not have two owners, and that is the scheduler's to keep.
//
// One thread. Outlives its BlockRefs. Allocates nothing after construction.
class BlockManager {
 public:
  explicit BlockManager(std::int32_t num_blocks);
  ~BlockManager();
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;

  // Nothing when no block is free.
  std::optional<BlockRef> Allocate();

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(in_use_.size()); }
  std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }

 private:
  friend class BlockRef;
  void Free(BlockId id);

  std::vector<BlockId> free_;  // the last one freed is taken first: it is the one still in caches
  std::vector<bool> in_use_;   // [num_blocks]
};

inline BlockRef::~BlockRef() {
  if (manager_ != nullptr) manager_->Free(id_);
}

}  // namespace weft
