#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace weft {

// The environment variable that names a child's end of the socket.
inline constexpr char kSupervisorFdVariable[] = "WEFT_SUPERVISOR_FD";

// A child and the descriptors that belong to it; plain values, owned by Supervisor.
struct ChildProcess {
  pid_t pid = -1;   // -1: not running
  int pid_fd = -1;  // readable once the child is dead
  int socket = -1;  // SOCK_SEQPACKET, not blocking: one message, one line
};

// Forks and executes `command` as Supervisor promises: dies with this thread, own process group,
// nothing inherited but standard output and error. INVALID_ARGUMENT when there is no such program.
absl::StatusOr<ChildProcess> StartChild(
    const std::vector<std::string>& command,
    const std::vector<std::pair<std::string, std::string>>& environment);

// Closes the descriptors of a child that has been reaped.
void ForgetChild(ChildProcess& child);

}  // namespace weft
