#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "server/base/mutex.h"

namespace weft {

// Calls `tick` every `interval` on a thread of its own, from one interval after construction until
// destruction, which waits for a call that runs.
class Ticker {
 public:
  Ticker(std::chrono::milliseconds interval, std::function<void()> tick);
  ~Ticker();
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

 private:
  void Run();

  const std::chrono::milliseconds interval_;
  const std::function<void()> tick_;
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace weft
