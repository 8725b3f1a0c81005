#include "worker/block_log.h"

#include <algorithm>
#include <utility>

namespace weft {

void BlockLog::Append(absl::Span<const BlockChange> changes) {
  if (changes.empty()) return;
  MutexLock lock(mutex_);
  for (const BlockChange& change : changes) {
    ++seq_;
    if (change.removed) {
      blocks_.erase(change.hash);
    } else {
      blocks_.insert_or_assign(change.hash, Stored{.seq = seq_, .parent = change.parent});
    }
    recent_.push_back(change);
    if (recent_.size() > static_cast<std::size_t>(num_blocks_)) recent_.pop_front();
  }
}

BlockLog::News BlockLog::Read(std::optional<std::uint64_t> seq) const {
  MutexLock lock(mutex_);
  News news{.seq = seq_};
  if (seq.has_value() && seq_ - *seq <= recent_.size()) {
    news.changes.assign(recent_.end() - static_cast<std::ptrdiff_t>(seq_ - *seq), recent_.end());
    return news;
  }
  news.snapshot = true;
  // A block is stored after its parent.
  std::vector<std::pair<std::uint64_t, BlockChange>> stored;
  stored.reserve(blocks_.size());
  for (const auto& [hash, entry] : blocks_) {
    stored.emplace_back(entry.seq, BlockChange{.hash = hash, .parent = entry.parent});
  }
  std::sort(stored.begin(), stored.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [at, change] : stored) news.changes.push_back(change);
  return news;
}

}  // namespace weft
