#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "router/recent_count.h"

namespace weft {

// How many requests a group gets done in a second while others wait for it: only then is that what
// it can. Not thread-safe.
class ServiceRate {
 public:
  using Clock = RecentCount::Clock;
  static constexpr std::int64_t kMinDone = 10;  // fewer tell too little

  // One more is there; `busy` is whether one waits.
  void OnStart(std::int64_t in_flight, bool busy, Clock::time_point now) {
    if (!busy || since_) return;
    since_ = now;
    from_ = in_flight;
    done_ = RecentCount();
  }

  // One has gone, `in_flight` are left; `done` is whether it was served.
  void OnEnd(std::int64_t in_flight, bool done, Clock::time_point now) {
    if (!since_) return;
    if (done) done_.Add(now);
    if (in_flight * 2 < from_) since_.reset();  // not only a gap between two requests
  }

  // In requests a second; nothing when nothing waits, or too little is known.
  std::optional<double> PerSecond(Clock::time_point now) {
    if (!since_) return std::nullopt;
    const std::int64_t done = done_.Sum(now);
    if (done < kMinDone) return std::nullopt;
    const double seconds = std::chrono::duration<double>(now - *since_).count();
    return static_cast<double>(done) / std::clamp<double>(seconds, 1, RecentCount::kSeconds);
  }

 private:
  std::optional<Clock::time_point> since_;  // busy
  std::int64_t from_ = 0;                   // that many were there then
  RecentCount done_;
};

}  // namespace weft
