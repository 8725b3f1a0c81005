#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/exit_codes.h"
#include "server/supervisor_link.h"

namespace weft {

// One child process of a group.
struct MemberSpec {
  std::string name;  // for the log: "rank 0"
  // Program and arguments of the next start; called for every start. The program is a path
  // (SiblingProgram() makes one). `ready[i]` is what member i of the group has reported in this
  // incarnation; empty for those not ready yet.
  std::function<std::vector<std::string>(absl::Span<const ReadyFields> ready)> command;
  // Added to the environment. Children inherit ours without its WEFT_ variables: resolved options
  // go down as arguments (OptionParser::Arguments()).
  std::vector<std::pair<std::string, std::string>> environment = {};
  // An earlier member of the group: this one starts once that one is ready.
  std::optional<int> start_after = std::nullopt;
};

// Children that live and die together.
struct GroupSpec {
  std::string name;  // for the log: "worker"
  std::vector<MemberSpec> members;
  // Each time when all members have reported ready, with what they reported.
  std::function<void(absl::Span<const ReadyFields> ready)> on_ready = nullptr;
  // Each time when a member has died unasked; the group is being killed and will start again.
  std::function<void()> on_lost = nullptr;
};

struct SupervisorOptions {
  absl::Duration stall_timeout = absl::Seconds(3);       // silence after which a child is killed
  absl::Duration drain_timeout = absl::Seconds(30);      // from SIGTERM to SIGKILL, per group
  absl::Duration min_backoff = absl::Milliseconds(200);  // before the first restart; doubles ...
  absl::Duration max_backoff = absl::Seconds(5);         // ... up to this
  absl::Duration healthy_after = absl::Seconds(10);  // ready for so long: min_backoff applies again
  // A group that dies so often in a row without ever having been ready ends the supervisor with
  // exit code 1; 0 means never.
  int max_failed_starts = 0;
};

// Starts, watches, restarts and stops groups of child processes. When a member of a group exits,
// is killed, or is silent for stall_timeout, all members are killed with SIGKILL, reaped, and
// started again after a backoff. A member that exits with kExitConfigError stops everything.
//
// No orphans: a child is killed by the kernel when the *thread* that started it ends (hence "main
// thread" below), so also when this process is killed; a child of a child in turn. What is
// orphaned below us is ours to reap (we are its subreaper), which needs waitpid(-1): a process
// with a Supervisor must have no other children.
// Signals: children run in process groups of their own, so Ctrl-C in a terminal reaches the top
// process only, which stops them in order. They get /dev/null as standard input, an empty signal
// mask, and no descriptor of ours but standard output and error and WEFT_SUPERVISOR_FD.
//
// Threading: everything on the main thread, RequestStop() on any. Callbacks run inside RunOnce().
class Supervisor {
 public:
  explicit Supervisor(const SupervisorOptions& options = {});
  // Kills with SIGKILL what still runs, and reaps it.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // Before the first RunOnce(). Returns the index of the group. Groups start together, and stop one
  // after the other: the last one first.
  int AddGroup(GroupSpec spec);

  // Stops when `fd` becomes readable (TerminationSignals::fd()); a second signal while stopping
  // kills with SIGKILL what is left. Not owned. `fd` is a signalfd and is read.
  void StopOnSignal(int signal_fd);

  // Waits up to `timeout` for something to happen and handles it. False when all is over: every
  // child is reaped, exit_code() is set.
  bool RunOnce(absl::Duration timeout);
  // RunOnce() until all is over; returns exit_code().
  int Run();

  // Starts an orderly stop: SIGTERM (and SIGCONT) to all members of the last group, SIGKILL after
  // drain_timeout, then the group before it. Idempotent, any thread, async-signal-safe.
  void RequestStop();

  // 0 after RequestStop() or a signal; kExitConfigError or 1 when a child ended it all.
  int exit_code() const;

  bool IsReady(int group) const;
  // Of the running members, in their order; for status and tests.
  std::vector<pid_t> Pids(int group) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The path of a program installed beside the running one: SiblingProgram("weft-worker").
std::string SiblingProgram(std::string_view name);

}  // namespace weft
