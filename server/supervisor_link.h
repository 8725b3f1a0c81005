#pragma once

#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "server/base/mutex.h"

namespace weft {

// What a process tells its supervisor when others may build on it: {"address", "unix-abstract:x"}.
// Keys and values have no spaces and no newlines; the whole fits into 16 KiB.
using ReadyFields = std::map<std::string, std::string>;

// The child's side of Supervisor. Create it first thing in main(), after TerminationSignals: until
// then the process is silent and may be taken for stalled. Without a supervisor (no
// WEFT_SUPERVISOR_FD in the environment) everything here does nothing.
//
// A thread of its own beats every 250 ms as long as the health check returns true, and ends the
// process at once with kExitSupervisorGone when the supervisor's end of the socket closes.
//
// Destroy it last: a process without it is silent again, however healthy its end is.
//
// Thread-safe. One per process: the constructor takes WEFT_SUPERVISOR_FD out of the environment.
class SupervisorLink {
 public:
  explicit SupervisorLink(absl::Duration beat_interval = absl::Milliseconds(250));
  ~SupervisorLink();
  SupervisorLink(const SupervisorLink&) = delete;
  SupervisorLink& operator=(const SupervisorLink&) = delete;

  bool supervised() const { return fd_ >= 0; }

  // Others may start now: members that wait for this one get `fields`. A later call replaces them.
  void ReportReady(const ReadyFields& fields);

  // `healthy` is asked before every beat, on the link's thread: true when there was progress since
  // it was last asked, or no work is due. It needs no patience of its own: the supervisor kills
  // after its stall timeout without a beat. Null means always healthy. When this returns, the
  // previous check is not running and will not run again.
  void SetHealthCheck(std::function<bool()> healthy);

 private:
  void BeatLoop();
  bool Healthy();

  const absl::Duration beat_interval_;
  int fd_ = -1;
  int stop_fd_ = -1;  // an eventfd: the destructor ends BeatLoop
  Mutex mutex_;
  std::function<bool()> healthy_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace weft
