#include "server/supervisor_link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/child_process.h"
#include "server/exit_codes.h"

namespace weft {
namespace {

// -1 when there is no supervisor.
int TakeSupervisorFd() {
  const char* text = std::getenv(kSupervisorFdVariable);
  if (text == nullptr) return -1;
  int fd = -1;
  const std::string_view view = text;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), fd);
  if (error != std::errc() || end != view.data() + view.size()) fd = -1;
  unsetenv(kSupervisorFdVariable);
  if (fd < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return -1;
  return fd;
}

}  // namespace

SupervisorLink::SupervisorLink(absl::Duration beat_interval)
    : beat_interval_(beat_interval), fd_(TakeSupervisorFd()) {
  if (fd_ < 0) return;
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  CHECK(stop_fd_ >= 0);
  thread_ = std::thread([this] { BeatLoop(); });
}

SupervisorLink::~SupervisorLink() {
  if (fd_ < 0) return;
  const std::uint64_t one = 1;
  CHECK(write(stop_fd_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  close(stop_fd_);
  close(fd_);
}

void SupervisorLink::ReportReady(const ReadyFields& fields) {
  if (fd_ < 0) return;
  std::string line = "ready";
  for (const auto& [key, value] : fields) line += fmt::format(" {}={}", key, value);
  // Should the supervisor be gone, BeatLoop() notices.
  send(fd_, line.data(), line.size(), MSG_NOSIGNAL);
}

void SupervisorLink::SetHealthCheck(std::function<bool()> healthy) {
  MutexLock lock(mutex_);
  healthy_ = std::move(healthy);
}

bool SupervisorLink::Healthy() {
  MutexLock lock(mutex_);
  return healthy_ == nullptr || healthy_();
}

void SupervisorLink::BeatLoop() {
  const int timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(beat_interval_));
  while (true) {
    if (Healthy()) {
      const ssize_t sent = send(fd_, "beat", 4, MSG_NOSIGNAL | MSG_DONTWAIT);
      // EAGAIN: the supervisor is behind and has plenty of beats to read.
      if (sent < 0 && errno != EAGAIN && errno != EINTR) _exit(kExitSupervisorGone);
    }
    pollfd fds[] = {{fd_, 0, 0}, {stop_fd_, POLLIN, 0}};  // POLLHUP is always reported
    poll(fds, 2, timeout_ms);
    if (fds[1].revents != 0) return;
    if (fds[0].revents != 0) _exit(kExitSupervisorGone);
  }
}

}  // namespace weft
