#include "tests/worker/group/rank_processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <thread>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"

namespace weft {
namespace {

void WriteAll(int fd, const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, at, bytes);
    CHECK(n > 0);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void ReadAll(int fd, void* data, std::size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = read(fd, at, bytes);
    CHECK_MSG(n > 0, "the other side of a test's pipe is gone");
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void WriteString(int fd, const std::string& text) {
  const std::uint64_t bytes = text.size();
  WriteAll(fd, &bytes, sizeof(bytes));
  WriteAll(fd, text.data(), text.size());
}

std::string ReadString(int fd) {
  std::uint64_t bytes = 0;
  ReadAll(fd, &bytes, sizeof(bytes));
  std::string text(bytes, '\0');
  ReadAll(fd, text.data(), text.size());
  return text;
}

std::string Connect(RankContext& context, const std::vector<std::string>& addresses) {
  context.mux = MakeCollectiveMux(*context.fabric);
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    context.tags.push_back(static_cast<std::uint32_t>(r));
    absl::StatusOr<PeerId> peer =
        context.fabric->Connect(addresses[r], static_cast<std::uint32_t>(context.rank));
    if (!peer.ok()) return peer.status().ToString();
    context.peers.push_back(*peer);
  }
  return "";
}

std::string RunChild(int rank, int num_ranks, int fd, const RankBody& body) {
  absl::StatusOr<std::unique_ptr<Fabric>> fabric = MakeUcxFabric();
  if (!fabric.ok()) return fabric.status().ToString();
  WriteString(fd, (*fabric)->LocalAddress());
  std::vector<std::string> addresses;
  for (int r = 0; r < num_ranks; ++r) addresses.push_back(ReadString(fd));
  RankContext context{.rank = rank, .fabric = fabric->get(), .control_fd = fd};
  std::string error = Connect(context, addresses);
  return error.empty() ? body(context) : error;
}

}  // namespace

std::vector<std::string> RunOnThreads(
    int num_ranks, const RankBody& body,
    const std::function<std::unique_ptr<Fabric>(int rank)>& make_fabric) {
  std::vector<std::unique_ptr<Fabric>> fabrics;
  std::vector<std::string> addresses;
  for (int r = 0; r < num_ranks; ++r) {
    fabrics.push_back(make_fabric ? make_fabric(r) : MakeLocalFabric(fmt::format("rank{}", r)));
    addresses.push_back(fabrics.back()->LocalAddress());
  }
  std::vector<std::string> answers(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] {
      const auto index = static_cast<std::size_t>(r);
      RankContext context{.rank = r, .fabric = fabrics[index].get()};
      answers[index] = Connect(context, addresses);
      if (answers[index].empty()) answers[index] = body(context);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answers;
}

RankProcesses::RankProcesses(int num_ranks, const RankBody& body,
                             const std::function<void(int rank)>& before_ucx) {
  // As every process of ours: UCX writes to sockets of peers that are gone.
  signal(SIGPIPE, SIG_IGN);
  for (int r = 0; r < num_ranks; ++r) {
    int sockets[2];
    int answers[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    CHECK(pipe(answers) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (const Child& sibling : children_) {
        close(sibling.fd);
        close(sibling.answer_fd);
      }
      close(sockets[0]);
      close(answers[0]);
      if (before_ucx) before_ucx(r);
      WriteString(answers[1], RunChild(r, num_ranks, sockets[1], body));
      _exit(0);
    }
    close(sockets[1]);
    close(answers[1]);
    children_.push_back({.pid = pid, .fd = sockets[0], .answer_fd = answers[0]});
  }
  std::vector<std::string> addresses;
  for (const Child& child : children_) addresses.push_back(ReadString(child.fd));
  for (const Child& child : children_) {
    for (const std::string& address : addresses) WriteString(child.fd, address);
  }
}

RankProcesses::~RankProcesses() {
  for (int r = 0; r < static_cast<int>(children_.size()); ++r) {
    Kill(r);
    close(children_[static_cast<std::size_t>(r)].fd);
    close(children_[static_cast<std::size_t>(r)].answer_fd);
  }
}

void RankProcesses::AwaitByte(int rank) {
  char byte = 0;
  ReadAll(children_[static_cast<std::size_t>(rank)].fd, &byte, 1);
}

void RankProcesses::SendByte(int rank) {
  const ssize_t sent = write(children_[static_cast<std::size_t>(rank)].fd, "g", 1);
  CHECK(sent == 1 || errno == EPIPE || errno == ECONNRESET);
}

void RankProcesses::Kill(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.exit_status.has_value()) return;
  kill(child.pid, SIGKILL);
  int status = 0;
  waitpid(child.pid, &status, 0);
  child.exit_status = status;
}

void RankProcesses::Reap() {
  for (Child& child : children_) {
    int status = 0;
    if (!child.exit_status.has_value() && waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.exit_status = status;
    }
  }
}

std::string RankProcesses::Join(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  std::string text;
  char buffer[4096];
  while (true) {
    Reap();
    pollfd answer = {.fd = child.answer_fd, .events = POLLIN, .revents = 0};
    if (poll(&answer, 1, 20) <= 0) continue;
    const ssize_t n = read(child.answer_fd, buffer, sizeof(buffer));
    if (n <= 0) break;
    text.append(buffer, static_cast<std::size_t>(n));
  }
  while (!child.exit_status.has_value()) {
    Reap();
    usleep(1000);
  }
  const int status = *child.exit_status;
  if (WIFSIGNALED(status)) return fmt::format("died of signal {}", WTERMSIG(status));
  if (text.size() < sizeof(std::uint64_t)) return fmt::format("exited with {}", status);
  return text.substr(sizeof(std::uint64_t));
}

std::vector<std::string> RankProcesses::JoinAll() {
  std::vector<std::string> answers;
  for (int r = 0; r < static_cast<int>(children_.size()); ++r) answers.push_back(Join(r));
  return answers;
}

}  // namespace weft
