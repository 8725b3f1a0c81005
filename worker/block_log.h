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
  // What a reader lacks, or the next part of it.
  struct News {
    bool snapshot =
        false;  // forget what was known: `changes` and those that follow are all there is
    std::uint64_t seq = 0;             // of the last change that is in
    std::vector<BlockChange> changes;  // parents first
  };

  // One reader's place in the log. One thread at a time.
  class Reader {
   public:
    // At most `max_changes` of what it lacks; no change when it has all. The parts of a snapshot
    // are numbered so that they end with the number of the last change that is in it: for who is
    // told, all but the first part are changes like any others.
    News Next(const BlockLog& log, std::size_t max_changes);

   private:
    std::optional<std::uint64_t> seq_;  // of the last change it has, or will with rest_
    std::vector<BlockChange> rest_;     // of a snapshot, the next one last
  };

  // `num_blocks` is the cache's size.
  explicit BlockLog(std::int32_t num_blocks) : num_blocks_(num_blocks) {}

  void Append(absl::Span<const BlockChange> changes);

 private:
  // For a reader who has everything up to change `seq`, or nothing at all: so many of the next
  // changes, or a whole snapshot.
  News Read(std::optional<std::uint64_t> seq, std::size_t max_changes) const;

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
