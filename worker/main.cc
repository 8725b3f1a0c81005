// weft-worker: one rank of a group, or the supervisor of all the ranks of this host.

#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "kernels/device/cpu_target.h"
#include "server/base/draw.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/base/status_macros.h"
#include "server/file_limit.h"
#include "server/group_flags.h"
#include "server/grpc_server.h"
#include "server/options.h"
#include "server/signals.h"
#include "server/supervisor.h"
#include "server/supervisor_link.h"
#include "server/tls_files.h"
#include "worker/rank_process.h"

namespace weft {
namespace {

struct Flags : GroupFlags {
  WorkerLimits request_limits;
  std::optional<std::int32_t> rank;
  std::optional<std::int32_t> local_ranks;
  std::string leader_address;
  std::vector<std::string> listen = {"0.0.0.0:50052"};
  std::string join_secret_file;
  TlsFiles tls;
  absl::Duration join_timeout = absl::Minutes(30);
  absl::Duration drain_timeout = absl::Seconds(30);
  std::int32_t max_failed_starts = 0;
  MetricsFlags metrics;

  void AddTo(OptionParser& parser) {
    GroupFlags::AddTo(parser);
    request_limits.AddTo(parser);
    parser.Group("Place in the group");
    parser.Add("--local-ranks", &local_ranks,
               "Ranks of this host; without --rank they are started and supervised here; default: "
               "all of the group",
               Range(1, 1024));
    parser.Add("--rank", &rank, "Be this one rank; 0 is the leader", Range(0, 1023));
    parser.Add("--leader-address", &leader_address, "Where rank 0 listens, for the other ranks");
    parser.Add("--listen", &listen,
               "Where the leader listens, comma-separated: host:port or unix-abstract:NAME");
    tls.AddTo(parser, "--",
              "Certificate of this rank, which routers and followers see at the leader, and the "
              "leader at a follower if it asks: a PEM file, with those between it and a CA behind "
              "it. With it the leader is reached by TLS",
              "PEM file with CAs. The leader wants a certificate of one from all who connect; a "
              "follower connects by TLS, to a leader with a certificate of one");
    parser.Add("--join-secret-file", &join_secret_file,
               "File with a secret, the same on all ranks: the leader admits no rank without it");
    parser.Add("--join-timeout", &join_timeout,
               "How long ranks wait for each other to have loaded; a rank that waits longer fails");
    parser.Add("--drain-timeout", &drain_timeout,
               "After SIGTERM, how long running requests may take to finish");
    parser.Add(
        "--max-failed-starts", &max_failed_starts,
        "Give up when the group has died so often in a row without ever being ready; 0: never",
        Range(0, 1 << 20));
    metrics.AddTo(parser,
                  "9401 and the rank; under a supervisor a free one, or, if given, that of rank 0");
  }
};

absl::Status Check(const Flags& flags) {
  RETURN_IF_ERROR(flags.Check());
  const std::int32_t tp = flags.tensor_parallel_size;
  if (flags.rank.has_value() && *flags.rank >= tp) {
    return absl::InvalidArgumentError(
        fmt::format("--rank is {}; a group of --tensor-parallel-size {} has ranks 0 to {}",
                    *flags.rank, tp, tp - 1));
  }
  if (flags.rank.value_or(0) > 0 && flags.leader_address.empty()) {
    return absl::InvalidArgumentError(fmt::format("rank {} needs --leader-address", *flags.rank));
  }
  if (!flags.rank.has_value() && flags.local_ranks.value_or(tp) != tp) {
    return absl::InvalidArgumentError(fmt::format(
        "--local-ranks is {} and --tensor-parallel-size {}: this host supervises a whole group; "
        "start the ranks of a group over several hosts one by one, with --rank",
        *flags.local_ranks, tp));
  }
  const std::int32_t port = flags.metrics.metrics_port.value_or(0);
  if (!flags.rank.has_value() && port > 65536 - tp) {
    return absl::InvalidArgumentError(fmt::format(
        "--metrics-port is {}; rank i of {} gets that and i more, up to 65535", port, tp));
  }
  return absl::OkStatus();
}

// The metrics port of a rank under the supervisor: of the ports from the one given, or any.
std::int32_t MetricsPortOf(std::int32_t rank, const MetricsFlags& flags) {
  const std::int32_t first = flags.metrics_port.value_or(0);
  return first > 0 ? first + rank : first;
}

// Starts all ranks of the group as children and keeps them running. They find the leader under an
// abstract socket name: no port to be stolen between two starts, no file to be left behind.
int Supervise(const Flags& flags, const OptionParser& parser, TerminationSignals& signals,
              SupervisorLink& link) {
  const std::int32_t num_ranks = flags.tensor_parallel_size;
  const std::string join_address =
      fmt::format("unix-abstract:weft-join-{}-{:016x}", getpid(), DrawUint64());
  const std::vector<std::string> common = GroupFlags::Arguments(parser);
  GroupSpec group{.name = "group"};
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<std::string> command = {SiblingProgram("weft-worker")};
    command.insert(command.end(), common.begin(), common.end());
    command.push_back(fmt::format("--rank={}", rank));
    command.push_back(fmt::format("--local-ranks={}", num_ranks));
    command.push_back(fmt::format("--join-timeout={}", absl::FormatDuration(flags.join_timeout)));
    command.push_back("--join-secret-file=" + flags.join_secret_file);
    command.push_back(fmt::format("--drain-timeout={}", absl::FormatDuration(flags.drain_timeout)));
    command.push_back(fmt::format("--metrics-port={}", MetricsPortOf(rank, flags.metrics)));
    command.push_back("--metrics-host=" + flags.metrics.metrics_host);
    if (rank == 0) {
      for (const std::string& address : flags.listen) command.push_back("--listen=" + address);
      command.push_back("--listen=" + join_address);
      command.push_back("--ssl-certfile=" + flags.tls.certfile);
      command.push_back("--ssl-keyfile=" + flags.tls.keyfile);
      command.push_back("--ssl-ca-certs=" + flags.tls.ca_certs);
    } else {
      command.push_back("--leader-address=" + join_address);
    }
    group.members.push_back(
        {.name = fmt::format("rank {}", rank),
         .command = [command](absl::Span<const ReadyFields>) { return command; }});
  }
  group.on_ready = [&link](absl::Span<const ReadyFields> ready) { link.ReportReady(ready[0]); };

  Supervisor supervisor({.stall_timeout = flags.stall_timeout,
                         .drain_timeout = flags.drain_timeout + absl::Seconds(5),
                         .min_backoff = flags.min_restart_backoff,
                         .max_backoff = flags.max_restart_backoff,
                         .max_failed_starts = flags.max_failed_starts});
  supervisor.AddGroup(std::move(group));
  supervisor.StopOnSignal(signals.fd());
  return supervisor.Run();
}

int Main(int argc, char** argv) {
  TerminationSignals signals;
  SupervisorLink link;
  Flags flags;
  OptionParser parser("weft-worker",
                      "Holds a model and a share of its KV cache; computes for weft-router.");
  flags.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  absl::Status status = Check(flags);
  if (status.ok()) status = kernels::InitCpuTarget();
  if (status.ok()) status = RaiseFileLimit(kMinServerFiles);
  if (status.ok()) status = flags.CheckModelDir();
  if (status.ok() && !flags.rank.has_value()) status = CheckModel(flags);
  if (!status.ok()) {
    PrintErr("weft-worker: {}\n", std::string(status.message()));
    return kExitConfigError;
  }
  InitLog(flags.rank.has_value() ? fmt::format("rank{}", *flags.rank) : "worker", flags.log_level);
  InitGrpcLog();
  if (!flags.rank.has_value()) return Supervise(flags, parser, signals, link);
  return RunRankProcess({.group = flags,
                         .request_limits = flags.request_limits,
                         .rank = *flags.rank,
                         .local_ranks = flags.local_ranks.value_or(1),
                         .listen = flags.listen,
                         .leader_address = flags.leader_address,
                         .join_secret_file = flags.join_secret_file,
                         .tls = flags.tls,
                         .join_timeout = flags.join_timeout,
                         .drain_timeout = flags.drain_timeout,
                         .metrics = flags.metrics},
                        signals, link);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  weft::HoldStandardFiles();
  return weft::Main(argc, argv);
}
