#pragma once

#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"
#include "server/error_reason.h"

namespace weft {

// The last errors that requests ended with, for people who look at the router. Thread-safe.
class RecentErrors {
 public:
  struct Entry {
    absl::Time time;
    std::string code;
    std::string reason;   // may be empty
    std::string message;  // as the client had it, cut
  };
  static constexpr std::size_t kMaxEntries = 20;
  static constexpr std::size_t kMaxMessageBytes = 300;

  void Add(const absl::Status& status) {
    Entry entry = {absl::Now(), absl::StatusCodeToString(status.code()), ReasonOf(status),
                   std::string(status.message().substr(0, kMaxMessageBytes))};
    // No part of a character at the end.
    while (entry.message.size() < status.message().size() && !entry.message.empty() &&
           (status.message()[entry.message.size()] & 0xc0) == 0x80) {
      entry.message.pop_back();
    }
    MutexLock lock(mutex_);
    entries_.push_front(std::move(entry));
    if (entries_.size() > kMaxEntries) entries_.pop_back();
  }

  // The newest first.
  std::vector<Entry> All() const {
    MutexLock lock(mutex_);
    return {entries_.begin(), entries_.end()};
  }

 private:
  mutable Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
