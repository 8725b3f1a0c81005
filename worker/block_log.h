#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/base/mutex.h"
#include "worker/engine/block_manager.h"

namespace weft {

// What the prefix cache of a group holds, for those who follow it from outside, each at his own
// pace. Changes are numbered from 1. No more than a cache's worth of them is kept: who lacks more
// gets a snapshot, which is no longer than that either.
//
// Thread-safe.
class BlockLog {
 public:
  // What a reader lacks.
  struct News {
    bool snapshot = false;  // `changes` are all blocks there are, parents first
    std::uint64_t seq = 0;  // of the last change that is in
    std::vector<BlockChange> changes;
  };

  // `num_blocks` is the cache's size.
  explicit BlockLog(std::int32_t num_blocks) : num_blocks_(num_blocks) {}

  void Append(absl::Span<const BlockChange> changes);
  // For a reader who has everything up to change `seq`, or nothing at all.
  News Read(std::optional<std::uint64_t> seq) const;

 private:
  struct Stored {
    std::uint64_t seq;
    std::optional<BlockHash> parent;
  };

  const std::int32_t num_blocks_;
  mutable Mutex mutex_;
  std::uint64_t seq_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<BlockChange> recent_ ABSL_GUARDED_BY(mutex_);  // the last of them, up to seq_
  absl::flat_hash_map<BlockHash, Stored, BlockHashBits> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
