#include "worker/engine/block_manager.h"

#include <algorithm>

namespace weft {
namespace {

// The first `i` in [0, end) for which `holds(i)` is false; it is true before and false from there.
template <typename Holds>
std::int32_t FirstWithout(std::int32_t end, Holds holds) {
  std::int32_t begin = 0;
  while (begin < end) {
    const std::int32_t middle = begin + (end - begin) / 2;
    if (holds(middle)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

BlockManager::BlockManager(std::int32_t num_blocks) : blocks_(num_blocks) {
  empty_.reserve(num_blocks);
  for (std::int32_t id = num_blocks - 1; id >= 0; --id) empty_.push_back(BlockId{id});
  // Twice what it will hold: then erased entries never make it grow.
  by_hash_.reserve(2 * static_cast<std::size_t>(num_blocks));
}

BlockManager::~BlockManager() { CHECK_MSG(num_free() == num_blocks(), "a BlockRef is still held"); }

std::optional<BlockRef> BlockManager::Allocate() {
  BlockId id{};
  if (!empty_.empty()) {
    id = empty_.back();
    empty_.pop_back();
  } else if (first_unheld_ >= 0) {
    id = BlockId{first_unheld_};
    RemoveUnheld(id);
    Block& block = At(id);
    block.cached = false;
    by_hash_.erase(block.hash);
    changes_.push_back({.hash = block.hash, .parent = std::nullopt, .removed = true});
    ++num_evictions_;
  } else {
    return std::nullopt;
  }
  At(id).num_holders = 1;
  return BlockRef(*this, id);
}

BlockRef BlockManager::Store(BlockRef block, const BlockHash& hash, const BlockHash* parent) {
  const auto [found, absent] = by_hash_.try_emplace(hash, block.id());
  if (!absent) return Share(hash);
  CHECK_MSG(parent == nullptr || by_hash_.contains(*parent), "stored before the block before it");
  Block& stored = At(block.id());
  CHECK(!stored.cached);
  stored.cached = true;
  stored.hash = hash;
  stored.depth = parent == nullptr ? 0 : At(by_hash_.at(*parent)).depth + 1;
  changes_.push_back({.hash = hash,
                      .parent = parent == nullptr ? std::nullopt : std::optional(*parent),
                      .removed = false});
  return block;
}

// A block is cached only if the one before it is, and held only if the one before it is: so both
// counts are where a binary search says.
BlockManager::CachedPrefix BlockManager::FindPrefix(absl::Span<const BlockHash> hashes) const {
  CachedPrefix prefix;
  prefix.num_blocks = FirstWithout(static_cast<std::int32_t>(hashes.size()),
                                   [&](std::int32_t i) { return by_hash_.contains(hashes[i]); });
  const std::int32_t num_held = FirstWithout(prefix.num_blocks, [&](std::int32_t i) {
    return blocks_[static_cast<std::int32_t>(by_hash_.at(hashes[i]))].num_holders > 0;
  });
  prefix.num_unheld = prefix.num_blocks - num_held;
  return prefix;
}

BlockRef BlockManager::Share(const BlockHash& hash) {
  const BlockId id = by_hash_.at(hash);
  if (At(id).num_holders++ == 0) RemoveUnheld(id);
  return BlockRef(*this, id);
}

void BlockManager::ForgetAll() {
  while (first_unheld_ >= 0) {
    empty_.push_back(BlockId{first_unheld_});
    RemoveUnheld(BlockId{first_unheld_});
  }
  std::vector<Block*> cached;
  for (Block& block : blocks_) {
    if (std::exchange(block.cached, false)) cached.push_back(&block);
  }
  std::sort(cached.begin(), cached.end(),
            [](const Block* a, const Block* b) { return a->depth > b->depth; });
  for (const Block* block : cached) {
    changes_.push_back({.hash = block->hash, .parent = std::nullopt, .removed = true});
  }
  by_hash_.clear();
}

absl::Span<const BlockChange> BlockManager::TakeChanges() {
  taken_changes_.clear();
  std::swap(changes_, taken_changes_);
  return taken_changes_;
}

void BlockManager::GiveBack(BlockId id) {
  Block& block = At(id);
  CHECK(block.num_holders > 0);
  if (--block.num_holders > 0) return;
  if (block.cached) {
    PushUnheld(id);
  } else {
    empty_.push_back(id);
  }
}

void BlockManager::PushUnheld(BlockId id) {
  const auto index = static_cast<std::int32_t>(id);
  blocks_[index].previous = last_unheld_;
  blocks_[index].next = -1;
  (last_unheld_ < 0 ? first_unheld_ : blocks_[last_unheld_].next) = index;
  last_unheld_ = index;
  ++num_unheld_;
}

void BlockManager::RemoveUnheld(BlockId id) {
  const Block& block = At(id);
  (block.previous < 0 ? first_unheld_ : blocks_[block.previous].next) = block.next;
  (block.next < 0 ? last_unheld_ : blocks_[block.next].previous) = block.previous;
  --num_unheld_;
}

}  // namespace weft
