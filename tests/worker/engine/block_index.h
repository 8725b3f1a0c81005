#pragma once

#include <map>
#include <optional>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "worker/engine/block_manager.h"

namespace weft {

// What somebody who only hears of changes makes of them, from an empty index on. Checks that each
// makes sense to him.
class BlockIndex {
 public:
  void Apply(absl::Span<const BlockChange> changes) {
    for (const BlockChange& change : changes) change.removed ? Remove(change) : Store(change);
  }
  bool Contains(const BlockHash& hash) const { return blocks_.contains(hash); }
  std::int32_t size() const { return static_cast<std::int32_t>(blocks_.size()); }
  friend bool operator==(const BlockIndex&, const BlockIndex&) = default;

 private:
  struct Entry {
    std::optional<BlockHash> parent;
    int num_children = 0;
    friend bool operator==(const Entry&, const Entry&) = default;
  };

  void Store(const BlockChange& change) {
    EXPECT_TRUE(blocks_.emplace(change.hash, Entry{change.parent}).second) << "stored twice";
    if (!change.parent.has_value()) return;
    const auto parent = blocks_.find(*change.parent);
    ASSERT_NE(parent, blocks_.end()) << "stored without its parent";
    ++parent->second.num_children;
  }
  void Remove(const BlockChange& change) {
    const auto removed = blocks_.find(change.hash);
    ASSERT_NE(removed, blocks_.end()) << "removed, but not there";
    EXPECT_EQ(removed->second.num_children, 0) << "removed, but not a leaf";
    if (removed->second.parent.has_value()) --blocks_.at(*removed->second.parent).num_children;
    blocks_.erase(removed);
  }

  std::map<BlockHash, Entry> blocks_;
};

}  // namespace weft
