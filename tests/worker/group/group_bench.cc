// Prints the median time of collectives over UCX between processes of this host.
// Usage: group_bench [ranks...]   (default: 2 4)
// With WEFT_BENCH_NETNS=/run/netns/a,/run/netns/b rank r enters the r-th of these network
// namespaces first: ranks of different hosts, as far as UCX can see.

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/rank_processes.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMaxBytes = 16 << 20;

std::string Bench(RankContext& context, bool shared) {
  NoStream stream;
  const std::unique_ptr<Communicator> communicator =
      context.MakeCommunicator({.id = shared ? 1U : 2U, .max_bytes = kMaxBytes});
  Communicator& c = *communicator;
  const int n = c.size();
  const auto allocate = [&] {
    return *(shared ? c.Allocate(kMaxBytes, stream) : kernels::Buffer::Allocate(kMaxBytes));
  };
  const kernels::Buffer in = allocate();
  const kernels::Buffer out = allocate();
  if (context.rank == 0) {
    fmt::print("{} ranks, {}, p50 us (p90)\n{:>10}", n,
               shared ? "the communicator's memory" : "other memory", "bytes");
  }
  constexpr const char* kNames[] = {"all-reduce", "all-gather", "reduce-sc", "all-to-all",
                                    "gather"};
  if (context.rank == 0) {
    for (const char* name : kNames) fmt::print("{:>20}", name);
    fmt::print("\n");
  }
  for (std::int64_t bytes :
       {0L, 256L, 4L << 10, 16L << 10, 64L << 10, 256L << 10, 1L << 20, 8L << 20}) {
    if (context.rank == 0) fmt::print("{:>10}", bytes);
    for (int op = 0; op < 5; ++op) {
      const int rounds = bytes > (256 << 10) ? 60 : 1500;
      std::vector<double> times;
      for (int i = 0; i < rounds; ++i) {
        const auto start = Clock::now();
        absl::Status status;
        switch (op) {
          case 0:
            status = c.AllReduceSum(out.data(), bytes / 4, DType::kFloat32, stream);
            break;
          case 1:
            status = c.AllGather(in.data(), out.data(), bytes / n, stream);
            break;
          case 2:
            status =
                c.ReduceScatterSum(in.data(), out.data(), bytes / 4 / n, DType::kFloat32, stream);
            break;
          case 3:
            status = c.AllToAll(in.data(), out.data(), bytes / n, stream);
            break;
          default:
            status = c.Gather(in.data(), out.data(), bytes / n, stream);
        }
        if (!status.ok()) return status.ToString();
        times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      }
      std::sort(times.begin(), times.end());
      if (context.rank == 0) {
        fmt::print("{:>20}", fmt::format("{:.1f} ({:.1f})", times[times.size() / 2],
                                         times[times.size() * 9 / 10]));
        std::fflush(stdout);
      }
    }
    if (context.rank == 0) fmt::print("\n");
  }
  std::fflush(stdout);
  return "";
}

std::string BenchBoth(RankContext& context) {
  std::string error = Bench(context, true);
  return error.empty() ? Bench(context, false) : error;
}

// Enters the network namespace that WEFT_BENCH_NETNS has for the rank.
void EnterNamespace(int rank) {
  const char* const list = std::getenv("WEFT_BENCH_NETNS");
  if (list == nullptr) return;
  std::istringstream paths(list);
  std::string path;
  for (int r = 0; r <= rank; ++r) CHECK(std::getline(paths, path, ',').good() || r == rank);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK_MSG(fd >= 0 && setns(fd, CLONE_NEWNET) == 0, path);
  close(fd);
  // UCX looks for devices in /sys/class/net, which shows the namespace of whoever mounted it.
  CHECK(unshare(CLONE_NEWNS) == 0);
  CHECK(mount("none", "/", nullptr, MS_REC | MS_SLAVE, nullptr) == 0);
  CHECK(umount2("/sys", MNT_DETACH) == 0);
  CHECK(mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {2, 4};
  int failed = 0;
  for (int n : sizes) {
    weft::RankProcesses ranks(n, weft::BenchBoth, weft::EnterNamespace);
    for (const std::string& answer : ranks.JoinAll()) {
      if (answer.empty()) continue;
      fmt::print(stderr, "{}\n", answer);
      failed = 1;
    }
  }
  return failed;
}
