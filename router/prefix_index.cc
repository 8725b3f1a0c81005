#include "router/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace weft {
namespace {

std::uint64_t Bits(const void* hash) {
  std::uint64_t bits;
  std::memcpy(&bits, hash, sizeof(bits));
  return bits;
}

}  // namespace

bool PrefixIndex::Apply(const v1::BlockChanges& changes) {
  const auto count = static_cast<std::uint64_t>(changes.changes_size());
  if (changes.snapshot()) {
    Clear();
    blocks_.reserve(count);
  } else if (!synced_ || changes.seq() != seq_ + count) {
    Clear();
    return false;
  }
  for (const v1::BlockChange& change : changes.changes()) {
    if (change.hash().size() != sizeof(BlockHash)) {
      Clear();
      return false;
    }
    if (change.removed()) {
      blocks_.erase(Bits(change.hash().data()));
    } else {
      blocks_.insert(Bits(change.hash().data()));
    }
  }
  seq_ = changes.seq();
  synced_ = true;
  return true;
}

void PrefixIndex::Clear() {
  blocks_ = {};
  synced_ = false;
}

std::size_t PrefixIndex::CountCached(absl::Span<const BlockHash> blocks) const {
  if (blocks_.empty()) return 0;
  const auto end = std::partition_point(
      blocks.begin(), blocks.end(),
      [this](const BlockHash& block) { return blocks_.contains(Bits(block.data())); });
  return static_cast<std::size_t>(end - blocks.begin());
}

}  // namespace weft
