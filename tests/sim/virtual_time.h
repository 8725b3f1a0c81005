#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace weft::sim {

using Random = std::mt19937_64;
using Duration = std::chrono::microseconds;

inline std::int64_t Draw(Random& random, std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, max)(random);
}
inline bool OneIn(Random& random, std::int64_t n) { return Draw(random, 1, n) == 1; }

// The clock of a simulation, and what is to happen when. One thread. What is due at the same moment
// happens in an order drawn by the seed.
class VirtualTime {
 public:
  explicit VirtualTime(std::uint64_t seed) : random_(seed) {}

  // The same moment on the clocks that the code under test reads.
  Duration now() const { return now_; }
  std::chrono::steady_clock::time_point SteadyNow() const {
    return std::chrono::steady_clock::time_point(now_);
  }
  absl::Time AbslNow() const { return absl::UnixEpoch() + absl::FromChrono(now_); }
  std::chrono::system_clock::time_point SystemTime(Duration at) const {
    return std::chrono::system_clock::time_point(at);
  }

  void After(Duration delay, std::function<void()> event) {
    events_.push({now_ + delay, random_(), std::move(event)});
  }

  // False when nothing is left to happen.
  bool RunOne() {
    if (events_.empty()) return false;
    const std::function<void()> event = std::move(const_cast<Event&>(events_.top()).run);
    now_ = events_.top().at;
    events_.pop();
    event();
    return true;
  }

  Random& random() { return random_; }

 private:
  struct Event {
    Duration at;
    std::uint64_t tie;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return at != other.at ? at > other.at : tie > other.tie;
    }
  };

  Random random_;
  Duration now_{0};
  std::priority_queue<Event> events_;
};

}  // namespace weft::sim
