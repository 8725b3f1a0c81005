#include "client/client_run.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "client/local_cluster.h"
#include "client/server_info.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "server/base/output.h"
#include "server/base/status_macros.h"
#include "server/file_limit.h"
#include "server/grpc_server.h"
#include "server/signals.h"
#include "server/supervisor.h"

namespace weft {
namespace {

// Waits until every group is ready: the router is when one of them is.
void PrintLayout(const std::shared_ptr<grpc::Channel>& channel,
                 const std::atomic<bool>& cancelled) {
  const auto stub = v1::Inference::NewStub(channel);
  auto info = FetchServerInfo(*stub, absl::Seconds(5));
  const auto ready = [](const v1::GroupInfo& group) { return group.ready(); };
  while (info.ok() && !std::all_of(info->groups().begin(), info->groups().end(), ready)) {
    if (cancelled) return;
    absl::SleepFor(absl::Milliseconds(50));
    info = FetchServerInfo(*stub, absl::Seconds(5));
  }
  if (!info.ok()) return;
  for (const v1::GroupInfo& group : info->groups()) {
    const std::string role = group.kv_role().empty() ? "" : fmt::format(" ({})", group.kv_role());
    PrintErr("{}{}: {}\n", group.model(), role, DescribeLayout(group));
  }
}

// The arguments of a router that serves this command only.
std::vector<std::string> RouterArguments(const ServerFlags& server, const GroupFlags& group) {
  std::vector<std::string> arguments = {
      "--listen=" + UniqueSocketAddress("router"),
      "--model=" + group.model,
      "--log-level=" + group.log_level,
      "--queue-timeout=inf",  // an unready group says so by itself
      "--drain-timeout=0s",   // whoever stops us does not wait for the rest
      "--metrics-port=-1",
      "--api-keys-file=",  // not that of a router elsewhere
  };
  if (!group.served_model_name.empty()) {
    arguments.push_back("--served-model-name=" + group.served_model_name);
  }
  // Who asks for a prefill group wants it used.
  if (server.prefill.tensor_parallel_size) arguments.push_back("--pd-min-prefill-tokens=1");
  if (server.skip_tokenizer_init) arguments.push_back("--skip-tokenizer-init");
  return arguments;
}

int RunWithOwnServer(const ServerFlags& server, const GroupFlags& group,
                     std::vector<std::string> worker_arguments,
                     const GrpcChannelOptions& channel_options, const ClientFunction& client) {
  // Only with processes to stop: a mere client dies of its signals.
  TerminationSignals signals;
  Supervisor supervisor({.stall_timeout = group.stall_timeout, .max_failed_starts = 1});
  std::atomic<bool> cancelled = false;
  std::atomic<int> signal = 0;
  std::thread signal_waiter([&] {
    signal = signals.Wait();
    cancelled = true;
    supervisor.RequestStop();
  });

  int client_code = 0;
  std::thread client_thread;
  worker_arguments.push_back("--log-level=" + group.log_level);
  worker_arguments.push_back("--max-failed-starts=3");
  worker_arguments.push_back("--metrics-port=-1");
  LocalCluster cluster = {.tensor_parallel_size = group.tensor_parallel_size,
                          .worker_arguments = std::move(worker_arguments),
                          .router_arguments = RouterArguments(server, group),
                          .prefill = server.prefill};
  cluster.on_ready = [&](const std::string& address) {
    if (client_thread.joinable()) return;  // the router was restarted; its requests have failed
    client_thread = std::thread([&, address] {
      const auto channel = NewGrpcChannel(address, channel_options);
      PrintLayout(channel, cancelled);
      client_code = client(channel, cancelled);
      supervisor.RequestStop();
    });
  };
  cluster.AddTo(supervisor);
  const int supervisor_code = supervisor.Run();

  cancelled = true;
  if (client_thread.joinable()) client_thread.join();
  signals.Wake();
  signal_waiter.join();
  if (signal != 0) return 128 + signal;  // as a shell says it
  return supervisor_code != 0 ? supervisor_code : client_code;
}

}  // namespace

void ServerFlags::AddTo(OptionParser& parser) {
  parser.Group("Where");
  parser.Add("--address", &address,
             "A running router, HOST:PORT; without it, processes are started for this call");
  connection.AddTo(parser);
  parser.Group("Where");
  parser.Add("--skip-tokenizer-init", &skip_tokenizer_init,
             "No tokenizer: prompts are token ids, and no text comes back");
  prefill.AddTo(parser);
}

absl::StatusOr<GrpcChannelOptions> CheckServerFlags(const ServerFlags& server,
                                                    const GroupFlags& group,
                                                    const OptionParser& parser) {
  if (server.address && server.address->empty()) {
    return absl::InvalidArgumentError("--address is empty; HOST:PORT of a router is wanted");
  }
  if (!server.address) {
    for (const char* name : {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"}) {
      if (!parser.GivenAsFlag(name)) continue;
      return absl::InvalidArgumentError(fmt::format(
          "{} is for a server at --address; processes of our own are on this host", name));
    }
    RETURN_IF_ERROR(group.Check());
    RETURN_IF_ERROR(server.prefill.Check(parser));
    RETURN_IF_ERROR(RaiseFileLimit(kMinServerFiles));
    return server.connection.ChannelOptions();
  }
  std::vector<std::string> arguments = GroupFlags::Arguments(parser);
  arguments.insert(arguments.end(), {"--skip-tokenizer-init", "--prefill-tensor-parallel-size",
                                     "--prefill-decode-context-parallel-size",
                                     "--prefill-cp-kv-cache-interleave-size"});
  for (const std::string& argument : arguments) {
    const std::string name = argument.substr(0, argument.find('='));
    if (name == "--served-model-name" || name == "--log-level") continue;
    if (!parser.GivenAsFlag(name)) continue;  // from the environment or a file, for other commands
    return absl::InvalidArgumentError(
        fmt::format("{} is for processes of our own; the server at --address {} has its own", name,
                    *server.address));
  }
  return server.connection.ChannelOptions();
}

int RunClient(const ServerFlags& server, const GroupFlags& group, const OptionParser& parser,
              const GrpcChannelOptions& channel_options, const ClientFunction& client) {
  if (server.address) {
    return client(NewGrpcChannel(*server.address, channel_options), /*cancelled=*/false);
  }
  return RunWithOwnServer(server, group, GroupFlags::Arguments(parser), channel_options, client);
}

}  // namespace weft
