#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/base/mutex.h"

namespace weft {

// A few threads for work on text, so that a long prompt does not hold one of gRPC's. Thread-safe.
class TextPool {
 public:
  // At least one thread; at most `max_jobs` wait for one.
  TextPool(int num_threads, std::size_t max_jobs);
  // Runs what was accepted, then ends.
  ~TextPool();
  TextPool(const TextPool&) = delete;
  TextPool& operator=(const TextPool&) = delete;

  // RESOURCE_EXHAUSTED (OVERLOADED) when too many wait; `job` is then never run.
  absl::Status Submit(std::function<void()> job);
  // Jobs that wait for a thread.
  std::int64_t num_waiting() const {
    MutexLock lock(mutex_);
    return static_cast<std::int64_t>(jobs_.size());
  }

 private:
  void Run();

  const std::size_t max_jobs_;
  mutable Mutex mutex_;
  CondVar work_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace weft
