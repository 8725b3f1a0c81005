#include "server/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <thread>

#include "fmt/format.h"
#include "server/base/bounded_time.h"
#include "server/base/check.h"
#include "server/base/log.h"
#include "server/child_process.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

constexpr int kExitFailedStarts = 1;
// Orphans from below are reaped no later than this after they died.
constexpr absl::Duration kReapInterval = absl::Milliseconds(100);
// How long an orphan from below, killed by the kernel with its parent, may take to die.
constexpr absl::Duration kOrphanPatience = absl::Seconds(2);

Clock::duration Chrono(absl::Duration duration) { return ToBoundedChrono(duration); }

std::string ExitText(int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       sigabbrev_np(WTERMSIG(status)));
  }
  return fmt::format("exited with code {}", WEXITSTATUS(status));
}

// "ready a=b c=d", without the first word.
ReadyFields ParseReady(std::string_view line) {
  ReadyFields fields;
  std::size_t at = line.find(' ');
  while (at != std::string_view::npos) {
    const std::size_t next = line.find(' ', at + 1);
    const std::string_view field = line.substr(at + 1, next - at - 1);
    const std::size_t equals = field.find('=');
    if (equals != std::string_view::npos) {
      fields[std::string(field.substr(0, equals))] = std::string(field.substr(equals + 1));
    }
    at = next;
  }
  return fields;
}

struct Member {
  MemberSpec spec;
  ChildProcess child;
  bool started = false;  // in this incarnation
  bool ready = false;
  TimePoint last_heard;

  bool alive() const { return child.pid > 0; }
};

enum class State {
  kUp,        // members run or wait for the one they start after
  kKilling,   // SIGKILL is sent; some are not reaped yet
  kBackoff,   // no member runs; starts again at retry_at
  kDraining,  // SIGTERM is sent; SIGKILL at kill_at
  kStopped,
};

struct Group {
  GroupSpec spec;
  std::vector<Member> members;
  std::vector<ReadyFields> ready_fields;  // by member; empty until it is ready
  State state = State::kBackoff;
  bool ready = false;
  TimePoint ready_since;
  TimePoint retry_at;
  TimePoint kill_at;
  absl::Duration backoff;
  int failed_starts = 0;

  bool AnyAlive() const {
    return std::any_of(members.begin(), members.end(), [](const Member& m) { return m.alive(); });
  }
  void Signal(int number) const {
    for (const Member& member : members) {
      if (member.alive()) kill(member.child.pid, number);
    }
  }
};

}  // namespace

struct Supervisor::Impl {
  SupervisorOptions options;
  std::vector<Group> groups;
  int stop_fd = -1;
  int signal_fd = -1;
  bool stopping = false;
  bool done = false;
  int exit_code = 0;
  TimePoint last_turn;

  void Start(Group& group);
  void StartMembers(Group& group);
  void Lose(Group& group, std::string_view cause);
  void Fail(int code);
  void KillAll();

  TimePoint NextDeadline(TimePoint now, absl::Duration timeout) const;
  void Poll(TimePoint deadline);
  void ReadStopSources();
  void ReadMessages(Group& group, Member& member);
  void OnReady(Group& group, Member& member, ReadyFields fields);
  void ReapAll();
  void OnExit(Group& group, Member& member, int status);
  void KillStalled(Group& group, TimePoint now);
  void Advance(Group& group, TimePoint now);
  void AdvanceStop(TimePoint now);
};

// --- Starting and losing groups.

void Supervisor::Impl::Start(Group& group) {
  group.state = State::kUp;
  group.ready = false;
  group.ready_fields.assign(group.members.size(), {});
  for (Member& member : group.members) {
    member.started = false;
    member.ready = false;
  }
  StartMembers(group);
}

void Supervisor::Impl::StartMembers(Group& group) {
  for (Member& member : group.members) {
    if (member.started) continue;
    const std::optional<int> after = member.spec.start_after;
    if (after.has_value() && !group.members[*after].ready) continue;
    absl::StatusOr<ChildProcess> child =
        StartChild(member.spec.command(group.ready_fields), member.spec.environment);
    if (!child.ok()) {
      spdlog::error("{}: {}", member.spec.name, std::string(child.status().message()));
      if (absl::IsInvalidArgument(child.status())) {
        group.Signal(SIGKILL);
        group.state = State::kKilling;
        Fail(kExitConfigError);
      } else {
        Lose(group, "could not be started");
      }
      return;
    }
    member.started = true;
    member.child = *child;
    member.last_heard = Clock::now();
    spdlog::debug("{}: started {} (pid {})", group.spec.name, member.spec.name, child->pid);
  }
}

void Supervisor::Impl::Lose(Group& group, std::string_view cause) {
  const TimePoint now = Clock::now();
  group.Signal(SIGKILL);
  group.state = State::kKilling;
  if (group.ready) {
    group.failed_starts = 0;
    if (now - group.ready_since >= Chrono(options.healthy_after)) {
      group.backoff = options.min_backoff;
    }
  } else {
    ++group.failed_starts;
  }
  group.ready = false;
  if (options.max_failed_starts > 0 && group.failed_starts >= options.max_failed_starts) {
    spdlog::error("{}: {}; it has failed to start {} times", group.spec.name, cause,
                  group.failed_starts);
    Fail(kExitFailedStarts);
  } else if (stopping) {
    spdlog::warn("{}: {}", group.spec.name, cause);
  } else {
    spdlog::warn("{}: {}; restarting {} in {}", group.spec.name, cause,
                 group.members.size() == 1 ? "it" : "the group",
                 absl::FormatDuration(group.backoff));
  }
  group.retry_at = now + Chrono(group.backoff);
  group.backoff = std::min(group.backoff * 2, options.max_backoff);
  if (group.spec.on_lost != nullptr) group.spec.on_lost();
}

void Supervisor::Impl::Fail(int code) {
  if (exit_code == 0) exit_code = code;
  stopping = true;
}

void Supervisor::Impl::KillAll() {
  for (Group& group : groups) {
    group.Signal(SIGKILL);
    if (group.state != State::kStopped) group.state = State::kKilling;
  }
}

// --- What happens.

TimePoint Supervisor::Impl::NextDeadline(TimePoint now, absl::Duration timeout) const {
  TimePoint deadline = now + Chrono(std::min(timeout, kReapInterval));
  for (const Group& group : groups) {
    if (group.state == State::kBackoff && !stopping) deadline = std::min(deadline, group.retry_at);
    if (group.state == State::kDraining) deadline = std::min(deadline, group.kill_at);
    if (group.state != State::kUp && group.state != State::kDraining) continue;
    for (const Member& member : group.members) {
      if (!member.alive()) continue;
      deadline = std::min(deadline, member.last_heard + Chrono(options.stall_timeout));
    }
  }
  return std::max(deadline, now);
}

void Supervisor::Impl::Poll(TimePoint deadline) {
  std::vector<pollfd> fds = {{stop_fd, POLLIN, 0}, {signal_fd, POLLIN, 0}};
  for (const Group& group : groups) {
    for (const Member& member : group.members) {
      if (!member.alive()) continue;
      fds.push_back({member.child.pid_fd, POLLIN, 0});
      fds.push_back({member.child.socket, POLLIN, 0});
    }
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  poll(fds.data(), fds.size(),
       static_cast<int>(std::clamp<std::int64_t>(wait.count(), 0, INT_MAX)));
}

void Supervisor::Impl::ReadStopSources() {
  std::uint64_t count = 0;
  if (read(stop_fd, &count, sizeof(count)) == sizeof(count)) stopping = true;
  signalfd_siginfo info;
  while (signal_fd >= 0 && read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
    if (stopping) {
      KillAll();
    } else {
      stopping = true;
    }
  }
}

void Supervisor::Impl::ReadMessages(Group& group, Member& member) {
  char buffer[16384];
  while (member.alive() && member.child.socket >= 0) {
    const ssize_t size = recv(member.child.socket, buffer, sizeof(buffer), 0);
    if (size < 0) return;  // EAGAIN: nothing more
    if (size == 0) {       // closed: dead, or about to be taken for stalled
      close(std::exchange(member.child.socket, -1));
      return;
    }
    member.last_heard = Clock::now();
    const std::string_view line(buffer, static_cast<std::size_t>(size));
    if (line == "ready" || line.starts_with("ready ")) OnReady(group, member, ParseReady(line));
  }
}

void Supervisor::Impl::OnReady(Group& group, Member& member, ReadyFields fields) {
  if (group.state != State::kUp) return;
  member.ready = true;
  group.ready_fields[&member - group.members.data()] = std::move(fields);
  StartMembers(group);
  if (group.ready || group.state != State::kUp) return;
  group.ready = std::all_of(group.members.begin(), group.members.end(),
                            [](const Member& m) { return m.ready; });
  if (!group.ready) return;
  group.ready_since = Clock::now();
  if (group.spec.on_ready != nullptr) group.spec.on_ready(group.ready_fields);
}

void Supervisor::Impl::ReapAll() {
  int status = 0;
  for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    for (Group& group : groups) {
      for (Member& member : group.members) {
        if (member.child.pid == pid) OnExit(group, member, status);
      }
    }
    // Any other pid is an orphan from below, now reaped.
  }
}

void Supervisor::Impl::OnExit(Group& group, Member& member, int status) {
  const pid_t pid = member.child.pid;
  ForgetChild(member.child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kExitConfigError && !stopping) {
    // It has said why. The rest of its group is of no use.
    group.Signal(SIGKILL);
    group.state = State::kKilling;
    Fail(kExitConfigError);
  } else if (group.state == State::kUp) {
    Lose(group, fmt::format("{} (pid {}) {}", member.spec.name, pid, ExitText(status)));
  }
}

void Supervisor::Impl::KillStalled(Group& group, TimePoint now) {
  for (Member& member : group.members) {
    if (!member.alive() || now - member.last_heard < Chrono(options.stall_timeout)) continue;
    member.last_heard = now;  // once is enough
    const std::string cause =
        fmt::format("{} (pid {}) gave no sign of life for {}", member.spec.name, member.child.pid,
                    absl::FormatDuration(options.stall_timeout));
    if (group.state == State::kUp) {
      Lose(group, cause);
    } else if (group.state == State::kDraining) {
      spdlog::warn("{}: {}; killed", group.spec.name, cause);
      kill(member.child.pid, SIGKILL);
    }
  }
}

void Supervisor::Impl::Advance(Group& group, TimePoint now) {
  KillStalled(group, now);
  if (group.state == State::kKilling && !group.AnyAlive()) group.state = State::kBackoff;
  if (group.state == State::kBackoff && !stopping && now >= group.retry_at) Start(group);
  if (group.state == State::kDraining && now >= group.kill_at) {
    spdlog::warn("{}: not drained in {}; killed", group.spec.name,
                 absl::FormatDuration(options.drain_timeout));
    group.Signal(SIGKILL);
    group.state = State::kKilling;
  }
  if (group.state == State::kDraining && !group.AnyAlive()) group.state = State::kStopped;
  if (group.state == State::kBackoff && stopping) group.state = State::kStopped;
}

// The last group that is not stopped yet is the one that drains.
void Supervisor::Impl::AdvanceStop(TimePoint now) {
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    if (group->state == State::kUp) {
      group->state = State::kDraining;
      group->kill_at = now + Chrono(options.drain_timeout);
      group->Signal(SIGTERM);
      group->Signal(SIGCONT);  // a stopped process would not see SIGTERM
    }
    if (group->state != State::kStopped) return;
  }
  // Orphans from below were killed with their parents; wait until they are gone.
  const TimePoint patience = Clock::now() + Chrono(kOrphanPatience);
  while (waitpid(-1, nullptr, WNOHANG) >= 0 && Clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  done = true;
}

// --- The class.

Supervisor::Supervisor(const SupervisorOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  CHECK(impl_->stop_fd >= 0);
  CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
  // Ignored, as some launchers leave it to us, waitpid() would not see children die.
  signal(SIGCHLD, SIG_DFL);
}

Supervisor::~Supervisor() {
  for (Group& group : impl_->groups) {
    group.Signal(SIGKILL);
    for (Member& member : group.members) {
      if (member.alive()) waitpid(member.child.pid, nullptr, 0);
      ForgetChild(member.child);
    }
  }
  close(impl_->stop_fd);
}

int Supervisor::AddGroup(GroupSpec spec) {
  Group group;
  for (const MemberSpec& member : spec.members) {
    const int index = static_cast<int>(group.members.size());
    CHECK(member.start_after.value_or(-1) < index && member.command != nullptr);
    group.members.push_back({.spec = member});
  }
  group.spec = std::move(spec);
  group.backoff = impl_->options.min_backoff;
  impl_->groups.push_back(std::move(group));
  return static_cast<int>(impl_->groups.size()) - 1;
}

void Supervisor::StopOnSignal(int signal_fd) { impl_->signal_fd = signal_fd; }

bool Supervisor::RunOnce(absl::Duration timeout) {
  Impl& impl = *impl_;
  if (impl.done) return false;
  impl.Poll(impl.NextDeadline(Clock::now(), timeout));
  impl.ReadStopSources();
  const TimePoint now = Clock::now();
  // After a pause of our own (SIGSTOP, a busy machine) nobody's silence says anything.
  const bool late = now - impl.last_turn > Chrono(impl.options.stall_timeout) / 2;
  impl.last_turn = now;
  for (Group& group : impl.groups) {
    for (Member& member : group.members) {
      if (late) member.last_heard = now;
      impl.ReadMessages(group, member);
    }
  }
  impl.ReapAll();
  for (Group& group : impl.groups) impl.Advance(group, now);
  if (impl.stopping) impl.AdvanceStop(now);
  return !impl.done;
}

int Supervisor::Run() {
  while (RunOnce(absl::Seconds(1))) {
  }
  return exit_code();
}

void Supervisor::RequestStop() {
  const std::uint64_t one = 1;
  // Only a full counter could fail, and that wakes as well.
  [[maybe_unused]] const ssize_t written = write(impl_->stop_fd, &one, sizeof(one));
}

int Supervisor::exit_code() const { return impl_->exit_code; }

bool Supervisor::IsReady(int group) const { return impl_->groups[group].ready; }

std::vector<pid_t> Supervisor::Pids(int group) const {
  std::vector<pid_t> pids;
  for (const Member& member : impl_->groups[group].members) {
    if (member.alive()) pids.push_back(member.child.pid);
  }
  return pids;
}

std::string SiblingProgram(std::string_view name) {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  CHECK(size > 0);
  const std::string_view self(path, static_cast<std::size_t>(size));
  return fmt::format("{}/{}", self.substr(0, self.rfind('/')), name);
}

}  // namespace weft
