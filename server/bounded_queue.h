#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/base/check.h"
#include "server/base/mutex.h"

namespace weft {

// A bounded queue of many producers and one consumer. Producers never wait; the consumer takes
// everything at once. Thread-safe. Allocates nothing once both vectors have grown to `capacity`.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) {
    CHECK(capacity > 0);
    items_.reserve(capacity);
  }

  // False when the queue is full; `item` is then dropped.
  [[nodiscard]] bool TryPush(T item) {
    {
      MutexLock lock(mutex_);
      if (items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    available_.NotifyOne();
    return true;
  }

  // Makes the running WaitFor(), or else the next one, return without waiting.
  void Wake() {
    {
      MutexLock lock(mutex_);
      woken_ = true;
    }
    available_.NotifyOne();
  }

  // Waits up to `timeout` for an item or Wake(), and takes nothing. Zero does not wait.
  void WaitFor(absl::Duration timeout) {
    const auto deadline = std::chrono::steady_clock::now() +
                          absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(1)));
    MutexLock lock(mutex_);
    while (items_.empty() && !woken_) {
      if (timeout <= absl::ZeroDuration() || !available_.WaitUntil(mutex_, deadline)) break;
    }
    woken_ = false;
  }

  // Replaces `out` by everything in the queue, oldest first, without waiting.
  void Drain(std::vector<T>& out) {
    out.clear();
    MutexLock lock(mutex_);
    out.swap(items_);
  }

  std::size_t size() const {
    MutexLock lock(mutex_);
    return items_.size();
  }
  std::size_t capacity() const { return capacity_; }

 private:
  const std::size_t capacity_;
  mutable Mutex mutex_;
  CondVar available_;
  std::vector<T> items_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weft
