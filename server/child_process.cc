#include "server/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "fmt/format.h"
#include "server/exit_codes.h"

namespace weft {
namespace {

constexpr int kChildSocket = 3;

// Options reach children as arguments; this one of the kernels has no flag.
constexpr std::string_view kCpuTarget = "WEFT_CPU_TARGET=";

std::vector<std::string> ChildEnvironment(
    const std::vector<std::pair<std::string, std::string>>& added) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (!text.starts_with("WEFT_") || text.starts_with(kCpuTarget)) result.emplace_back(text);
  }
  for (const auto& [name, value] : added) result.push_back(fmt::format("{}={}", name, value));
  result.push_back(fmt::format("{}={}", kSupervisorFdVariable, kChildSocket));
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

absl::Status Errno(std::string_view what) {
  return absl::InternalError(fmt::format("{}: {}", what, std::strerror(errno)));
}

// In the child: only what is safe between fork and exec of a process with threads.
[[noreturn]] void ExecuteChild(char* const* command, char* const* environment, int socket,
                               pid_t parent, std::string_view exec_error) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExitSupervisorGone);  // it died before the prctl
  setpgid(0, 0);
  if (const int null = open("/dev/null", O_RDONLY); null > 0) dup2(null, STDIN_FILENO);
  if (socket == kChildSocket) {
    fcntl(socket, F_SETFD, 0);
  } else {
    dup2(socket, kChildSocket);
  }
  close_range(kChildSocket + 1, ~0U, 0);
  for (int signal_number = 1; signal_number < NSIG; ++signal_number) {
    signal(signal_number, SIG_DFL);  // an ignored signal would stay so after exec
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execve(command[0], command, environment);
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, exec_error.data(), exec_error.size());
  _exit(kExitConfigError);
}

}  // namespace

absl::StatusOr<ChildProcess> StartChild(
    const std::vector<std::string>& command,
    const std::vector<std::pair<std::string, std::string>>& environment) {
  if (command.empty() || access(command[0].c_str(), X_OK) != 0) {
    return absl::InvalidArgumentError(fmt::format("cannot run {}: {}",
                                                  command.empty() ? "an empty command" : command[0],
                                                  std::strerror(errno)));
  }
  std::vector<std::string> arguments = command;
  std::vector<std::string> variables = ChildEnvironment(environment);
  const std::vector<char*> argument_pointers = Pointers(arguments);
  const std::vector<char*> variable_pointers = Pointers(variables);
  const std::string exec_error = fmt::format("cannot execute {}\n", command[0]);

  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    return Errno("socketpair");
  }
  fcntl(sockets[0], F_SETFL, O_NONBLOCK);
  const pid_t parent = getpid();
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of ours runs in the child
  const pid_t pid = fork();
  if (pid == 0) {
    ExecuteChild(argument_pointers.data(), variable_pointers.data(), sockets[1], parent,
                 exec_error);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  close(sockets[1]);
  if (pid < 0) {
    close(sockets[0]);
    return Errno("fork");
  }
  setpgid(pid, pid);  // here as well: whoever is first
  // Not pidfd_open(): glibc 2.36 declares it without extern "C".
  const int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pid_fd < 0) {  // out of descriptors: it will not run unwatched
    absl::Status status = Errno("pidfd_open");
    kill(pid, SIGKILL);
    close(sockets[0]);
    return status;
  }
  return ChildProcess{.pid = pid, .pid_fd = pid_fd, .socket = sockets[0]};
}

void ForgetChild(ChildProcess& child) {
  if (child.pid_fd >= 0) close(child.pid_fd);
  if (child.socket >= 0) close(child.socket);
  child = {};
}

}  // namespace weft
