#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace weft {

// How often something happened in the last ten seconds, to a second. `now` never goes back. Not
// thread-safe.
class RecentCount {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kSeconds = 10;

  void Add(Clock::time_point now) {
    Advance(now);
    ++counts_[Slot(second_)];
    ++sum_;
  }

  std::int64_t Sum(Clock::time_point now) {
    Advance(now);
    return sum_;
  }

 private:
  static std::size_t Slot(std::int64_t second) {
    return static_cast<std::size_t>(second % kSeconds);
  }
  void Advance(Clock::time_point now) {
    const std::int64_t second =
        std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
    if (second - second_ >= kSeconds) {
      counts_.fill(0);
      sum_ = 0;
      second_ = second;
    }
    while (second_ < second) {
      std::int64_t& expired = counts_[Slot(++second_)];
      sum_ -= expired;
      expired = 0;
    }
  }

  std::int64_t second_ = 0;
  std::int64_t sum_ = 0;
  std::array<std::int64_t, kSeconds> counts_{};
};

}  // namespace weft
