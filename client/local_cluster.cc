#include "client/local_cluster.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/draw.h"
#include "server/kv_transfer_flags.h"

namespace weft {
namespace {

std::vector<std::string> Command(std::string_view program, std::vector<std::string> first,
                                 const std::vector<std::string>& more) {
  std::vector<std::string> command = {SiblingProgram(program)};
  command.insert(command.end(), std::make_move_iterator(first.begin()),
                 std::make_move_iterator(first.end()));
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

void AddWorkers(Supervisor& supervisor, std::string name, const std::string& leader, int num_ranks,
                const std::vector<std::string>& arguments) {
  const std::vector<std::string> worker = Command(
      "weft-worker", {fmt::format("--local-ranks={}", num_ranks), "--listen=" + leader}, arguments);
  GroupSpec workers = {.name = std::move(name), .members = {{.name = "weft-worker"}}};
  workers.members[0].command = [worker](absl::Span<const ReadyFields>) { return worker; };
  supervisor.AddGroup(std::move(workers));
}

constexpr std::string_view kConfigFlag = "--kv-transfer-config=";

// `arguments` without the flags of `names` ("--block-size").
std::vector<std::string> Without(const std::vector<std::string>& arguments,
                                 absl::Span<const std::string_view> names) {
  std::vector<std::string> rest;
  for (const std::string& argument : arguments) {
    const std::string name = argument.substr(0, argument.find('='));
    if (std::find(names.begin(), names.end(), name) == names.end()) rest.push_back(argument);
  }
  return rest;
}

// --kv-transfer-config of a group: what the user gave, with a role.
std::string KvConfig(const std::vector<std::string>& arguments, KvRole role) {
  nlohmann::json config = nlohmann::json::object();
  for (const std::string& argument : arguments) {
    if (argument.starts_with(kConfigFlag)) {
      config = nlohmann::json::parse(argument.substr(kConfigFlag.size()), nullptr, false);
    }
  }
  config["kv_role"] = KvRoleName(role);
  return std::string(kConfigFlag) + config.dump();
}

}  // namespace

void PrefillFlags::AddTo(OptionParser& parser) {
  parser.Group("Prefill group");
  parser.Add("--prefill-tensor-parallel-size", &tensor_parallel_size,
             "Ranks of a group that computes the prompts, beside the one that continues them; "
             "default: there is none",
             Range(1, 1024));
  parser.Add("--prefill-decode-context-parallel-size", &decode_context_parallel_size,
             "As --decode-context-parallel-size, of the prefill group", Range(1, 1024));
  parser.Add("--prefill-cp-kv-cache-interleave-size", &interleave,
             "As --cp-kv-cache-interleave-size, of the prefill group", Range(1, 1 << 30));
}

absl::Status PrefillFlags::Check(const OptionParser& parser) const {
  if (tensor_parallel_size.has_value()) {
    if (*tensor_parallel_size % decode_context_parallel_size == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("--prefill-decode-context-parallel-size is {}; it has to divide "
                    "--prefill-tensor-parallel-size, which is {}",
                    decode_context_parallel_size, *tensor_parallel_size));
  }
  for (const char* name :
       {"--prefill-decode-context-parallel-size", "--prefill-cp-kv-cache-interleave-size"}) {
    if (parser.GivenAsFlag(name)) {
      return absl::InvalidArgumentError(
          fmt::format("{} needs --prefill-tensor-parallel-size", name));
    }
  }
  return absl::OkStatus();
}

void LocalCluster::AddTo(Supervisor& supervisor) const {
  const std::string leader = UniqueSocketAddress("leader");
  std::string groups = leader;
  if (!prefill.tensor_parallel_size.has_value()) {
    AddWorkers(supervisor, "workers", leader, tensor_parallel_size, worker_arguments);
  } else {
    constexpr std::string_view kConfig[] = {"--kv-transfer-config"};
    std::vector<std::string> decode = Without(worker_arguments, kConfig);
    decode.push_back(KvConfig(worker_arguments, KvRole::kConsumer));
    AddWorkers(supervisor, "decode", leader, tensor_parallel_size, decode);

    constexpr std::string_view kLayout[] = {"--kv-transfer-config", "--tensor-parallel-size",
                                            "--decode-context-parallel-size",
                                            "--cp-kv-cache-interleave-size"};
    std::vector<std::string> arguments = Without(worker_arguments, kLayout);
    arguments.push_back(KvConfig(worker_arguments, KvRole::kProducer));
    arguments.push_back(fmt::format("--tensor-parallel-size={}", *prefill.tensor_parallel_size));
    arguments.push_back(
        fmt::format("--decode-context-parallel-size={}", prefill.decode_context_parallel_size));
    if (prefill.interleave.has_value()) {
      arguments.push_back(fmt::format("--cp-kv-cache-interleave-size={}", *prefill.interleave));
    }
    const std::string prefill_leader = UniqueSocketAddress("prefill");
    AddWorkers(supervisor, "prefill", prefill_leader, *prefill.tensor_parallel_size, arguments);
    groups += "," + prefill_leader;
  }
  const std::vector<std::string> router =
      Command("weft-router", {"--groups=" + groups}, router_arguments);

  GroupSpec routers = {.name = "router", .members = {{.name = "weft-router"}}};
  routers.members[0].command = [router](absl::Span<const ReadyFields>) { return router; };
  routers.on_ready = [done = on_ready](absl::Span<const ReadyFields> ready) {
    done(ready[0].at("address"));
  };
  supervisor.AddGroup(std::move(routers));
}

std::string UniqueSocketAddress(std::string_view role) {
  return fmt::format("unix-abstract:weft-{}-{:016x}-{}", getpid(), DrawUint64(), role);
}

}  // namespace weft
