#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace weft {

struct BreakerOptions {
  std::int32_t failures = 5;  // in a row, that open it; 0: none do
  std::chrono::milliseconds open_time{5000};
};

// How a request's stay at a group ended, as far as it tells of the group.
enum class GroupOutcome {
  kNone,    // nothing: refused, cancelled before the first token, never sent
  kServed,  // it had a token, or an end
  kFailed,  // the group is at fault
  kLost,    // the group was lost, with all that it had
};

// Keeps requests away from a group whose streams fail: opens after some failures in a row, and then
// lets one request through every open_time; closes with the first that is served. A loss is one
// failure, however many streams it ends. Not thread-safe.
class Breaker {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Breaker(const BreakerOptions& options) : options_(options) {}

  bool open() const { return open_; }
  bool Allows(Clock::time_point now) const { return !open_ || now >= next_try_; }

  void OnStart(Clock::time_point now) {
    if (open_) next_try_ = now + options_.open_time;
  }

  // `epoch` is that of the group's incarnation. True when it closes.
  bool OnEnd(GroupOutcome outcome, std::uint64_t epoch, Clock::time_point now) {
    if (outcome == GroupOutcome::kServed) {
      failures_ = 0;
      const bool closes = open_;
      open_ = false;
      return closes;
    }
    if (outcome == GroupOutcome::kNone) return false;
    if (outcome == GroupOutcome::kLost && lost_epoch_ == epoch) return false;
    if (outcome == GroupOutcome::kLost) lost_epoch_ = epoch;
    if (options_.failures == 0 || ++failures_ < options_.failures) return false;
    open_ = true;
    next_try_ = now + options_.open_time;
    return false;
  }

 private:
  const BreakerOptions options_;
  bool open_ = false;
  std::int32_t failures_ = 0;  // in a row
  std::optional<std::uint64_t> lost_epoch_;
  Clock::time_point next_try_{};
};

}  // namespace weft
