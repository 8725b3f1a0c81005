#include "server/supervisor.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/signals.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string Helper() { return SiblingProgram("supervised_child"); }

// Living processes (zombies too) that have `tag` among their arguments, and our own zombies.
std::vector<pid_t> ProcessesOf(const std::string& tag) {
  std::vector<pid_t> found;
  DIR* dir = opendir("/proc");
  while (const dirent* entry = readdir(dir)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0 || pid == getpid()) continue;
    const std::string base = std::string("/proc/") + entry->d_name;
    std::stringstream command;
    command << std::ifstream(base + "/cmdline").rdbuf();
    if (command.str().find(tag + '\0') != std::string::npos) found.push_back(pid);
    std::string stat;
    std::getline(std::ifstream(base + "/stat"), stat);
    // "pid (name) state ppid ..."; the name may hold anything but ends at the last parenthesis.
    std::istringstream rest(stat.substr(stat.rfind(')') + 1));
    std::string state;
    pid_t parent = 0;
    rest >> state >> parent;
    if (parent == getpid() && state == "Z") found.push_back(pid);
  }
  closedir(dir);
  return found;
}

class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest() {
    // What the processes we kill leave behind comes to us, so that we can see that it ends.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    options_.stall_timeout = absl::Milliseconds(700);
    options_.min_backoff = absl::Milliseconds(20);
    options_.max_backoff = absl::Milliseconds(100);
    tag_ = std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()) +
           std::to_string(getpid());
  }
  ~SupervisorTest() override { EXPECT_THAT(ProcessesOf(tag_), IsEmpty()); }

  MemberSpec Child(std::string mode, std::string argument = "") {
    return {.name = mode, .command = [=, tag = tag_](absl::Span<const ReadyFields>) {
              return std::vector<std::string>{Helper(), mode, tag, argument};
            }};
  }

  // A patience that no correct run needs.
  static bool RunUntil(Supervisor& supervisor, const std::function<bool()>& condition) {
    const auto start = std::chrono::steady_clock::now();
    while (!condition()) {
      if (!supervisor.RunOnce(absl::Milliseconds(20))) return condition();
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(30)) return false;
    }
    return true;
  }

  static bool RunUntilReady(Supervisor& supervisor, int group) {
    return RunUntil(supervisor, [&] { return supervisor.IsReady(group); });
  }

  // Ready again with none of `old`.
  static bool RunUntilReplaced(Supervisor& supervisor, int group, const std::vector<pid_t>& old) {
    return RunUntil(supervisor, [&] {
      const std::vector<pid_t> now = supervisor.Pids(group);
      return supervisor.IsReady(group) && now.size() == old.size() &&
             std::none_of(now.begin(), now.end(), [&](pid_t pid) {
               return std::find(old.begin(), old.end(), pid) != old.end();
             });
    });
  }

  static int Stop(Supervisor& supervisor) {
    supervisor.RequestStop();
    return supervisor.Run();
  }

  SupervisorOptions options_;
  std::string tag_;
};

TEST_F(SupervisorTest, AMemberStartsWhenTheOneItWaitsForIsReadyAndGetsItsFields) {
  Supervisor supervisor(options_);
  MemberSpec leader = Child("run");
  MemberSpec follower{
      .name = "follower",
      .command =
          [this](absl::Span<const ReadyFields> ready) {
            EXPECT_EQ(ready.size(), 2);
            EXPECT_THAT(ready[1], IsEmpty());
            return std::vector<std::string>{Helper(), "run", tag_, ready[0].at("address")};
          },
      .start_after = 0};
  std::vector<ReadyFields> ready;
  supervisor.AddGroup({.name = "g", .members = {leader, follower}, .on_ready = [&](auto fields) {
                         ready.assign(fields.begin(), fields.end());
                       }});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  ASSERT_THAT(ready, SizeIs(2));
  EXPECT_EQ(ready[0].at("address"), "at:" + std::to_string(supervisor.Pids(0)[0]));
  EXPECT_EQ(ready[1].at("argument"), ready[0].at("address"));
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AKilledMemberTakesItsGroupWithItAndNoOther) {
  Supervisor supervisor(options_);
  int lost = 0;
  supervisor.AddGroup({.name = "a",
                       .members = {Child("run"), Child("run"), Child("run")},
                       .on_lost = [&] { ++lost; }});
  supervisor.AddGroup({.name = "b", .members = {Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  ASSERT_TRUE(RunUntilReady(supervisor, 1));
  const std::vector<pid_t> other = supervisor.Pids(1);
  for (int victim = 0; victim < 3; ++victim) {
    const std::vector<pid_t> before = supervisor.Pids(0);
    kill(before[victim], SIGKILL);
    ASSERT_TRUE(RunUntilReplaced(supervisor, 0, before)) << victim;
    EXPECT_EQ(lost, victim + 1);
  }
  EXPECT_EQ(supervisor.Pids(1), other);
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AMemberThatExitsWithZeroUnaskedIsLostToo) {
  Supervisor supervisor(options_);
  int lost = 0;
  supervisor.AddGroup({.name = "g",
                       .members = {Child("run"), Child("exit_when_ready", "0")},
                       .on_lost = [&] { ++lost; }});
  EXPECT_TRUE(RunUntil(supervisor, [&] { return lost >= 2; }));
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, DeathsAreSeenThoughOurLauncherIgnoresThem) {
  signal(SIGCHLD, SIG_IGN);
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("exit", "78")}});
  EXPECT_EQ(supervisor.Run(), kExitConfigError);
}

TEST_F(SupervisorTest, AStoppedMemberIsReplaced) {
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("run"), Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  const std::vector<pid_t> before = supervisor.Pids(0);
  kill(before[1], SIGSTOP);
  EXPECT_TRUE(RunUntilReplaced(supervisor, 0, before));
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AMemberIsReplacedWhenItsHealthCheckFailsOrItNeverBeats) {
  for (const char* mode : {"sick", "silent"}) {
    Supervisor supervisor(options_);
    int lost = 0;
    supervisor.AddGroup({.name = "g", .members = {Child(mode)}, .on_lost = [&] { ++lost; }});
    EXPECT_TRUE(RunUntil(supervisor, [&] { return lost >= 2; })) << mode;
    EXPECT_EQ(Stop(supervisor), 0);
  }
}

TEST_F(SupervisorTest, APauseOfTheWholeMachineIsNoStall) {
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  const std::vector<pid_t> before = supervisor.Pids(0);
  kill(before[0], SIGSTOP);
  std::this_thread::sleep_for(absl::ToChronoMilliseconds(options_.stall_timeout * 2));
  supervisor.RunOnce(absl::ZeroDuration());
  kill(before[0], SIGCONT);
  for (int turn = 0; turn < 5; ++turn) supervisor.RunOnce(absl::Milliseconds(20));
  EXPECT_EQ(supervisor.Pids(0), before);
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AConfigurationErrorStopsEverythingWithItsCode) {
  Supervisor supervisor(options_);
  int starts = 0;
  MemberSpec bad{.name = "bad", .command = [&](absl::Span<const ReadyFields>) {
                   ++starts;
                   return std::vector<std::string>{Helper(), "exit", tag_, "78"};
                 }};
  supervisor.AddGroup({.name = "a", .members = {Child("run")}});
  supervisor.AddGroup({.name = "b", .members = {Child("stubborn"), bad}});
  supervisor.AddGroup({.name = "c", .members = {Child("run")}});
  EXPECT_EQ(supervisor.Run(), kExitConfigError);
  EXPECT_EQ(starts, 1);
}

TEST_F(SupervisorTest, AProgramThatCannotRunIsAConfigurationError) {
  for (const char* program : {"/nonexistent/program", "/etc/passwd", ""}) {
    Supervisor supervisor(options_);
    supervisor.AddGroup(
        {.name = "g",
         .members = {Child("run"), {.name = "m", .command = [&](absl::Span<const ReadyFields>) {
                                      return std::vector<std::string>{program};
                                    }}}});
    EXPECT_EQ(supervisor.Run(), kExitConfigError) << program;
  }
}

TEST_F(SupervisorTest, RestartsWaitLongerEachTimeAndEndAtTheLimit) {
  options_.min_backoff = absl::Milliseconds(20);
  options_.max_backoff = absl::Milliseconds(80);
  options_.max_failed_starts = 5;
  Supervisor supervisor(options_);
  std::vector<absl::Duration> starts;
  supervisor.AddGroup(
      {.name = "g", .members = {{.name = "m", .command = [&](absl::Span<const ReadyFields>) {
                                   starts.push_back(absl::FromChrono(
                                       std::chrono::steady_clock::now().time_since_epoch()));
                                   return std::vector<std::string>{Helper(), "exit", tag_, "3"};
                                 }}}});
  EXPECT_EQ(supervisor.Run(), 1);
  ASSERT_THAT(starts, SizeIs(5));
  const int at_least_ms[] = {20, 40, 80, 80};
  for (int i = 0; i < 4; ++i) {
    EXPECT_GE(starts[i + 1] - starts[i], absl::Milliseconds(at_least_ms[i])) << i;
  }
}

TEST_F(SupervisorTest, GroupsStopOneAfterTheOtherFromTheLast) {
  Supervisor supervisor(options_);
  for (int i = 0; i < 3; ++i)
    supervisor.AddGroup({.name = "g", .members = {Child("drain", "100")}});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(RunUntilReady(supervisor, i));
  supervisor.RequestStop();
  while (supervisor.RunOnce(absl::Seconds(1))) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(supervisor.Pids(i + 1).empty() || supervisor.Pids(i).size() == 1) << i;
    }
  }
  EXPECT_EQ(supervisor.exit_code(), 0);
}

TEST_F(SupervisorTest, StopEndsMembersThatIgnoreItOrAreStopped) {
  options_.drain_timeout = absl::Milliseconds(300);
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("stubborn"), Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  kill(supervisor.Pids(0)[0], SIGSTOP);
  kill(supervisor.Pids(0)[1], SIGSTOP);
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AStoppedMemberStillEndsInOrder) {
  options_.stall_timeout = absl::Hours(1);
  options_.drain_timeout = absl::Hours(1);  // of no help
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  kill(supervisor.Pids(0)[0], SIGSTOP);
  EXPECT_EQ(Stop(supervisor), 0);
}

TEST_F(SupervisorTest, AMemberThatDiesWhileDrainingLeavesTheOthersTheirTime) {
  options_.stall_timeout = absl::Hours(1);
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("drain", "1500"), Child("run")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  const pid_t slow = supervisor.Pids(0)[0];
  supervisor.RequestStop();
  ASSERT_TRUE(RunUntil(supervisor, [&] { return supervisor.Pids(0).size() < 2; }));
  EXPECT_THAT(supervisor.Pids(0), ElementsAre(slow));
  EXPECT_EQ(supervisor.Run(), 0);
}

TEST_F(SupervisorTest, ASignalStopsAndASecondOneKills) {
  TerminationSignals signals;
  for (const int count : {1, 2}) {
    Supervisor supervisor(options_);
    supervisor.AddGroup({.name = "g", .members = {Child(count == 1 ? "run" : "stubborn")}});
    supervisor.StopOnSignal(signals.fd());
    ASSERT_TRUE(RunUntilReady(supervisor, 0));
    for (int i = 0; i < count; ++i) {
      kill(getpid(), i == 0 ? SIGINT : SIGTERM);
      supervisor.RunOnce(absl::Milliseconds(50));
    }
    EXPECT_EQ(supervisor.Run(), 0);
  }
}

TEST_F(SupervisorTest, AChildInheritsNothingItShouldNot) {
  ASSERT_EQ(setenv("WEFT_BLOCK_SIZE", "16", 1), 0);
  const int leak = open("/etc/passwd", O_RDONLY);  // without O_CLOEXEC
  signal(SIGUSR1, SIG_IGN);
  Supervisor supervisor(options_);
  MemberSpec member = Child("inspect");
  member.environment = {{"ADDED", "value"}};
  ReadyFields seen;
  supervisor.AddGroup(
      {.name = "g", .members = {member}, .on_ready = [&](auto fields) { seen = fields[0]; }});
  EXPECT_TRUE(RunUntilReady(supervisor, 0));
  EXPECT_EQ(seen["descriptors"], "0:/dev/null,");
  EXPECT_EQ(seen["own_group"], "yes");
  EXPECT_EQ(seen["usr1"], "default");
  EXPECT_EQ(seen["inherited"], "no");
  EXPECT_EQ(seen["added"], "value");
  EXPECT_EQ(Stop(supervisor), 0);
  signal(SIGUSR1, SIG_DFL);
  close(leak);
  unsetenv("WEFT_BLOCK_SIZE");
}

TEST_F(SupervisorTest, DestructionLeavesNoChild) {
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "g", .members = {Child("run"), Child("stubborn")}});
  EXPECT_TRUE(RunUntilReady(supervisor, 0));
}

// A supervisor below ours: what its end does to its own children.
TEST_F(SupervisorTest, AKilledOrStoppedSupervisorLeavesNoOrphanAndIsReplaced) {
  for (const int signal_number : {SIGKILL, SIGSTOP}) {
    Supervisor supervisor(options_);
    supervisor.AddGroup({.name = "top", .members = {Child("nest")}});
    ASSERT_TRUE(RunUntilReady(supervisor, 0));
    const std::vector<pid_t> before = ProcessesOf(tag_);
    ASSERT_THAT(before, SizeIs(3));
    kill(supervisor.Pids(0)[0], signal_number);
    ASSERT_TRUE(RunUntilReplaced(supervisor, 0, supervisor.Pids(0))) << signal_number;
    ASSERT_TRUE(RunUntil(supervisor, [&] { return ProcessesOf(tag_).size() == 3; }));
    for (const pid_t pid : ProcessesOf(tag_)) {
      EXPECT_EQ(std::count(before.begin(), before.end(), pid), 0) << pid;
    }
    EXPECT_EQ(Stop(supervisor), 0);
    EXPECT_THAT(ProcessesOf(tag_), IsEmpty());
  }
}

TEST_F(SupervisorTest, AGrandchildThatDiesIsReplacedBelowWithoutLosingTheSupervisor) {
  Supervisor supervisor(options_);
  supervisor.AddGroup({.name = "top", .members = {Child("nest")}});
  ASSERT_TRUE(RunUntilReady(supervisor, 0));
  const std::vector<pid_t> middle = supervisor.Pids(0);
  const std::vector<pid_t> before = ProcessesOf(tag_);
  for (const pid_t pid : before) {
    if (pid != middle[0]) kill(pid, SIGKILL);
  }
  EXPECT_TRUE(RunUntil(supervisor, [&] {
    const std::vector<pid_t> now = ProcessesOf(tag_);
    return now.size() == 3 && std::count_if(now.begin(), now.end(), [&](pid_t pid) {
                                return std::count(before.begin(), before.end(), pid) == 1;
                              }) == 1;
  }));
  EXPECT_EQ(supervisor.Pids(0), middle);
  EXPECT_EQ(Stop(supervisor), 0);
}

// With children that watch their socket, and with such that the kernel alone can end.
TEST_F(SupervisorTest, KillingATopSupervisorLeavesNothing) {
  for (const char* mode : {"nest", "nest_silent"}) {
    const pid_t top = fork();
    if (top == 0) {
      execl(Helper().c_str(), Helper().c_str(), mode, tag_.c_str(), nullptr);
      _exit(1);
    }
    while (ProcessesOf(tag_).size() < 3) usleep(10000);
    kill(top, SIGKILL);
    while (waitpid(-1, nullptr, 0) > 0) {  // until we have no child left
    }
    EXPECT_THAT(ProcessesOf(tag_), IsEmpty());
  }
}

TEST_F(SupervisorTest, AChildEndsWhenTheSocketOfItsSupervisorCloses) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(sockets[0]);
    setenv("WEFT_SUPERVISOR_FD", std::to_string(sockets[1]).c_str(), 1);
    execl(Helper().c_str(), Helper().c_str(), "run", tag_.c_str(), nullptr);
    _exit(1);
  }
  close(sockets[1]);
  char message[64] = {};
  ASSERT_GT(read(sockets[0], message, sizeof(message)), 0);  // it lives
  close(sockets[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kExitSupervisorGone);
}

}  // namespace
}  // namespace weft
