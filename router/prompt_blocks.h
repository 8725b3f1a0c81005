#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/base/mutex.h"
#include "server/block_hash.h"

namespace weft {

// The prompt of a request, and the hashes of its blocks, once for each way in which groups make
// them. Thread-safe.
class PromptBlocks {
 public:
  // What is hashed, read until it is destroyed.
  PromptBlocks(absl::Span<const std::int32_t> token_ids, std::string_view cache_salt)
      : token_ids_(token_ids), cache_salt_(cache_salt) {}

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(token_ids_.size()); }

  // Hashes unless it has before: about a microsecond for 128 tokens. `key` is the group's
  // block_hash_key.
  void Hash(const std::string& key, std::int32_t block_size);
  // Of the full blocks; none when Hash() was not called for that key. Valid until destruction.
  absl::Span<const BlockHash> Find(const std::string& key) const;

 private:
  const absl::Span<const std::int32_t> token_ids_;
  const std::string_view cache_salt_;
  mutable Mutex mutex_;
  // By key: the chain, whose first element is no block's.
  absl::flat_hash_map<std::string, std::unique_ptr<const std::vector<BlockHash>>> chains_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
