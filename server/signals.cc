#include "server/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "server/base/check.h"

namespace weft {

TerminationSignals::TerminationSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
  signal(SIGPIPE, SIG_IGN);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  CHECK(signal_fd_ >= 0 && wake_fd_ >= 0);
}

TerminationSignals::~TerminationSignals() {
  close(signal_fd_);
  close(wake_fd_);
}

int TerminationSignals::Wait(absl::Duration timeout) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    signalfd_siginfo info;
    if (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
      return static_cast<int>(info.ssi_signo);
    }
    std::uint64_t count = 0;
    if (read(wake_fd_, &count, sizeof(count)) == sizeof(count)) return 0;
    const absl::Duration waited = absl::FromChrono(std::chrono::steady_clock::now() - start);
    const absl::Duration left = std::min(timeout - waited, absl::Minutes(1));
    if (left <= absl::ZeroDuration()) return 0;
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    poll(fds, 2, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  }
}

void TerminationSignals::Wake() {
  const std::uint64_t one = 1;
  // Only a full counter could fail, and that wakes as well.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

}  // namespace weft
