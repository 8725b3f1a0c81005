// A child process for supervisor_test.cc: `supervised_child MODE TAG [ARGUMENT]`. TAG is only there
// to find the process in /proc.

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "server/base/log.h"
#include "server/signals.h"
#include "server/supervisor.h"
#include "server/supervisor_link.h"

namespace weft {
namespace {

int Inspect(SupervisorLink& link, TerminationSignals& signals) {
  std::string descriptors;
  DIR* dir = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(dir)) {
    const int fd = std::atoi(entry->d_name);
    char target[256] = {};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) <= 0 || fd == dirfd(dir)) continue;
    const std::string name = target;
    // Ours: the link's socket, its eventfd and those of TerminationSignals.
    if (fd > 3 && name.starts_with("anon_inode:")) continue;
    if (fd == 0 || fd > 3) descriptors += std::to_string(fd) + ":" + name + ",";
  }
  closedir(dir);
  struct sigaction pipe_action = {};
  sigaction(SIGUSR1, nullptr, &pipe_action);
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  link.ReportReady(
      {{"descriptors", descriptors},
       {"own_group", getpgrp() == getpid() ? "yes" : "no"},
       {"usr1", pipe_action.sa_handler == SIG_DFL && sigismember(&mask, SIGUSR1) == 0 ? "default"
                                                                                      : "changed"},
       {"inherited", std::getenv("WEFT_BLOCK_SIZE") == nullptr ? "no" : "yes"},
       {"added", std::getenv("ADDED") == nullptr ? "" : std::getenv("ADDED")}});
  signals.Wait();
  return 0;
}

// Supervises two children of its own.
int Nest(SupervisorLink& link, TerminationSignals& signals, const char* self, const char* tag,
         std::initializer_list<const char*> modes) {
  SupervisorOptions options;
  options.drain_timeout = absl::Milliseconds(200);
  Supervisor supervisor(options);
  GroupSpec group{.name = "nested"};
  for (const char* mode : modes) {
    group.members.push_back({.name = mode, .command = [=](absl::Span<const ReadyFields>) {
                               return std::vector<std::string>{self, mode, tag};
                             }});
  }
  group.on_ready = [&](absl::Span<const ReadyFields>) { link.ReportReady({}); };
  supervisor.AddGroup(std::move(group));
  supervisor.StopOnSignal(signals.fd());
  return supervisor.Run();
}

int Main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string mode = argv[1];
  const std::string argument = argc > 3 ? argv[3] : "";
  InitLog("child", "warn");
  if (mode == "exit") return std::atoi(argument.c_str());
  if (mode == "silent") {
    pause();
    return 0;
  }
  TerminationSignals signals;
  SupervisorLink link(absl::Milliseconds(50));
  if (mode == "inspect") return Inspect(link, signals);
  if (mode == "nest") return Nest(link, signals, argv[0], argv[2], {"run", "stubborn"});
  if (mode == "nest_silent") return Nest(link, signals, argv[0], argv[2], {"silent", "silent"});
  std::atomic<bool> healthy = true;
  link.SetHealthCheck([&healthy] { return healthy.load(); });
  link.ReportReady({{"address", "at:" + std::to_string(getpid())}, {"argument", argument}});
  if (mode == "sick") healthy = false;
  if (mode == "exit_when_ready") return std::atoi(argument.c_str());
  signals.Wait();
  if (mode == "stubborn") {
    while (true) pause();
  }
  if (mode == "drain") usleep(static_cast<useconds_t>(std::atoi(argument.c_str())) * 1000);
  return 0;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::Main(argc, argv); }
