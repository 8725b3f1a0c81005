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

BlockLog::News BlockLog::Read(std::optional<std::uint64_t> seq, std::size_t max_changes) const {
  News news;
  // A block is stored after its parent.
  std::vector<std::pair<std::uint64_t, BlockChange>> stored;
  {
    MutexLock lock(mutex_);
    news.seq = seq_;
    if (seq.has_value() && seq_ - *seq <= recent_.size()) {
      const auto first = recent_.end() - static_cast<std::ptrdiff_t>(seq_ - *seq);
      const auto count = std::min<std::size_t>(seq_ - *seq, max_changes);
      news.changes.assign(first, first + static_cast<std::ptrdiff_t>(count));
      news.seq = *seq + count;
      return news;
    }
    stored.reserve(blocks_.size());
    for (const auto& [hash, entry] : blocks_) {
      stored.emplace_back(entry.seq, BlockChange{.hash = hash, .parent = entry.parent});
    }
  }
  std::sort(stored.begin(), stored.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  news.snapshot = true;
  news.changes.reserve(stored.size());
  for (auto& [at, change] : stored) news.changes.push_back(change);
  return news;
}

BlockLog::News BlockLog::Reader::Next(const BlockLog& log, std::size_t max_changes) {
  News news;
  if (rest_.empty()) {
    news = log.Read(seq_, max_changes);
    seq_ = news.seq;
    if (!news.snapshot || news.changes.size() <= max_changes) return news;
    rest_ = std::move(news.changes);
    std::reverse(rest_.begin(), rest_.end());
    news.changes.clear();
  }
  const std::size_t count = std::min(rest_.size(), max_changes);
  news.changes.assign(rest_.rbegin(), rest_.rbegin() + static_cast<std::ptrdiff_t>(count));
  rest_.resize(rest_.size() - count);
  // Never below 0: every block that is there was a change once.
  news.seq = *seq_ - rest_.size();
  return news;
}

}  // namespace weft
