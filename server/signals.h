#pragma once

#include <optional>

#include "absl/time/time.h"

namespace weft {

// SIGTERM, SIGINT and SIGHUP as something to wait for instead of handlers. Construct it first in
// main(), before any thread starts (gRPC's included): it blocks them in this thread, and threads
// inherit that. Also ignores SIGPIPE.
//
// Wait() is for one thread; Wake() for any.
class TerminationSignals {
 public:
  TerminationSignals();
  ~TerminationSignals();
  TerminationSignals(const TerminationSignals&) = delete;
  TerminationSignals& operator=(const TerminationSignals&) = delete;

  // The signal that came, 0 after Wake() or when `timeout` has passed. A Wake() before the wait is
  // not lost.
  int Wait(absl::Duration timeout = absl::InfiniteDuration());
  void Wake();

  // A signalfd, for Supervisor::StopOnSignal().
  int fd() const { return signal_fd_; }

 private:
  int signal_fd_;
  int wake_fd_;
};

}  // namespace weft
