#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "server/block_hash.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// The blocks that the prefix cache of one group holds, as its leader publishes them. Keeps 64 bits
// of each hash, about 18 bytes a block with the table around them, and as many blocks as the
// leader has, so that its memory is bounded by the group's: two blocks of equal bits only cost a
// worse placement. One thread at a time.
class PrefixIndex {
 public:
  // False when `changes` do not follow what was applied last, or hold what is no hash: the index is
  // empty then, and waits for a snapshot.
  bool Apply(const v1::BlockChanges& changes);
  void Clear();

  // How many of the first blocks of a prompt are cached, by the hashes of its blocks. A block is
  // cached only if the one before it is.
  std::size_t CountCached(absl::Span<const BlockHash> blocks) const;

  std::size_t size() const { return blocks_.size(); }
  // Of memory, about.
  std::size_t bytes() const { return blocks_.capacity() * (sizeof(std::uint64_t) + 1); }

 private:
  absl::flat_hash_set<std::uint64_t> blocks_;
  std::uint64_t seq_ = 0;
  bool synced_ = false;  // a snapshot has come, and all that followed
};

}  // namespace weft
