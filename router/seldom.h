#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace weft {

// Which of many lines about a state that lasts go to the log: not the same one again, and of those
// that take turns one a minute. `now` never goes back. Not thread-safe.
class Seldom {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::minutes kInterval{1};

  bool Allows(std::string_view line, Clock::time_point now) {
    if (line == last_ || now < next_) return false;
    last_ = line;
    next_ = now + kInterval;
    return true;
  }

 private:
  std::string last_;
  Clock::time_point next_ = Clock::time_point::min();
};

}  // namespace weft
