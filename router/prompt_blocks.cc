#include "router/prompt_blocks.h"

#include <utility>

namespace weft {

void PromptBlocks::Hash(const std::string& key, std::int32_t block_size) {
  MutexLock lock(mutex_);
  auto& chain = chains_[key];
  if (chain != nullptr) return;
  std::vector<BlockHash> hashes = StartHashChain(key, cache_salt_);
  hashes.reserve(1 + token_ids_.size() / static_cast<std::size_t>(block_size));
  ExtendHashChain(token_ids_, block_size, hashes);
  chain = std::make_unique<const std::vector<BlockHash>>(std::move(hashes));
}

absl::Span<const BlockHash> PromptBlocks::Find(const std::string& key) const {
  MutexLock lock(mutex_);
  const auto it = chains_.find(key);
  if (it == chains_.end()) return {};
  return absl::MakeConstSpan(*it->second).subspan(1);
}

}  // namespace weft
