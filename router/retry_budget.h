#pragma once

#include <cstdint>

#include "router/recent_count.h"

namespace weft {

struct RetryBudgetOptions {
  double ratio = 0.2;              // of the requests of the last ten seconds
  std::int64_t min_retries = 100;  // in ten seconds, however few requests there are
};

// Keeps retries a fraction of the load, so that groups that refuse requests are not flooded with
// the same ones again. Not thread-safe.
class RetryBudget {
 public:
  using Clock = RecentCount::Clock;

  explicit RetryBudget(const RetryBudgetOptions& options) : options_(options) {}

  void OnRequest(Clock::time_point now) { requests_.Add(now); }

  // Whether one more retry is within the budget now.
  bool CanRetry(Clock::time_point now) {
    const double allowed = static_cast<double>(options_.min_retries) +
                           options_.ratio * static_cast<double>(requests_.Sum(now));
    return static_cast<double>(retries_.Sum(now) + 1) <= allowed;
  }
  void OnRetry(Clock::time_point now) { retries_.Add(now); }

 private:
  const RetryBudgetOptions options_;
  RecentCount requests_;
  RecentCount retries_;
};

}  // namespace weft
