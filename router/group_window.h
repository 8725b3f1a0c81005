#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <utility>

namespace weft {

// How many requests at a time a group takes from this router, as its refusals tell: when it refuses
// one as overloaded it has as many as it takes, and the next goes there when one of them ends. Now
// and then one more is tried, and more and more while none is refused. Not thread-safe.
class GroupWindow {
 public:
  using Clock = std::chrono::steady_clock;

  GroupWindow(std::chrono::milliseconds min_backoff, std::chrono::milliseconds max_backoff)
      : min_backoff_(min_backoff), max_backoff_(max_backoff), backoff_(min_backoff) {}

  bool Open(std::int64_t in_flight) const { return in_flight < limit_; }

  // It refused one; `in_flight` without that one.
  void OnOverload(std::int64_t in_flight, Clock::time_point now) {
    limit_ = std::min(limit_, in_flight);
    step_ = 1;
    if (!std::exchange(tries_, false)) return;  // with others, of the same moment
    next_growth_ = now + backoff_;
    backoff_ = std::min(backoff_ * 2, max_backoff_);
  }

  // Every now and then. True when Open() may have changed.
  bool Grow(std::int64_t in_flight, Clock::time_point now) {
    if (Open(in_flight) || now < next_growth_) return false;
    if (step_ > kMaxStep) {
      limit_ = kNone;
      return true;
    }
    if (step_ > 1) backoff_ = min_backoff_;  // what was tried last was taken
    limit_ += step_;
    step_ *= 2;
    tries_ = true;
    next_growth_ = now + backoff_;
    return true;
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  static constexpr std::int64_t kMaxStep = 64;

  std::chrono::milliseconds min_backoff_;
  std::chrono::milliseconds max_backoff_;
  std::int64_t limit_ = kNone;         // while it has refused nothing
  std::int64_t step_ = 1;              // of the next growth
  bool tries_ = true;                  // has grown since the last refusal
  std::chrono::milliseconds backoff_;  // after the next refusal, or growth
  Clock::time_point next_growth_{};
};

}  // namespace weft
