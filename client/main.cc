#include <cstdio>
#include <string>
#include <string_view>

#include "client/commands.h"
#include "fmt/format.h"
#include "server/base/output.h"
#include "server/exit_codes.h"
#include "server/file_limit.h"
#include "server/version.h"

namespace {

constexpr std::string_view kUsage =
    "weft: a decode cluster for language models whose KV cache is sharded by position\n"
    "\n"
    "  weft serve MODEL_DIR [flags]     a router and a group of workers on this host\n"
    "  weft generate [flags]            complete prompts, with processes of its own or a server's\n"
    "  weft bench [flags]               measure a server, or one started for it, under load\n"
    "  weft status [flags]              what serves behind a router, and its load\n"
    "  weft plan MODEL [flags]          what layouts of a model hold and cost, from its config\n"
    "\n"
    "weft COMMAND --help lists the flags of a command.\n";

int Run(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  const bool is_known =
      command == "serve" || command == "generate" || command == "bench" || command == "status";
  if (is_known) {
    if (const absl::Status status = weft::RaiseFileLimit(weft::kMinClientFiles); !status.ok()) {
      weft::PrintErr("weft: {}\n", std::string(status.message()));
      return weft::kExitConfigError;
    }
  }
  if (command == "serve") return weft::ServeCommand(argc - 1, argv + 1);
  if (command == "generate") return weft::GenerateCommand(argc - 1, argv + 1);
  if (command == "bench") return weft::BenchCommand(argc - 1, argv + 1);
  if (command == "status") return weft::StatusCommand(argc - 1, argv + 1);
  if (command == "plan") return weft::PlanCommand(argc - 1, argv + 1);
  if (command == "--help" || command == "-h" || command == "help") {
    weft::PrintOut(kUsage);
    return 0;
  }
  if (command == "--version") {
    weft::PrintOut(fmt::format("weft {}\n", weft::Version()));
    return 0;
  }
  if (command.empty()) {
    weft::PrintErr("{}", kUsage);
  } else {
    weft::PrintErr(
        "weft: there is no command \"{}\"; serve, generate, bench, status and plan are there\n",
        command);
  }
  return weft::kExitConfigError;
}

}  // namespace

int main(int argc, char** argv) {
  weft::HoldStandardFiles();
  return weft::FinishOutput(Run(argc, argv));
}
