#include "worker/engine/block_manager.h"

namespace weft {

BlockManager::BlockManager(std::int32_t num_blocks) : in_use_(num_blocks, false) {
  free_.reserve(num_blocks);
  for (std::int32_t id = num_blocks - 1; id >= 0; --id) free_.push_back(BlockId{id});
}

BlockManager::~BlockManager() { CHECK_MSG(num_free() == num_blocks(), "a BlockRef is still held"); }

std::optional<BlockRef> BlockManager::Allocate() {
  if (free_.empty()) return std::nullopt;
  const BlockId id = free_.back();
  free_.pop_back();
  in_use_[static_cast<std::int32_t>(id)] = true;
  return BlockRef(*this, id);
}

void BlockManager::Free(BlockId id) {
  CHECK(in_use_[static_cast<std::int32_t>(id)]);
  in_use_[static_cast<std::int32_t>(id)] = false;
  free_.push_back(id);
}

}  // namespace weft
