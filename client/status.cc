#include <optional>
#include <string>

#include "client/commands.h"
#include "client/connection.h"
#include "client/server_info.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/grpc_server.h"
#include "server/options.h"

namespace weft {

int StatusCommand(int argc, char** argv) {
  std::string address = "127.0.0.1:50051";
  std::string format = "text";
  absl::Duration timeout = absl::Seconds(5);
  ConnectionFlags connection;
  OptionParser parser("weft status", "What serves behind a router, and its load.");
  parser.Add("--address", &address, "The router: HOST:PORT or unix-abstract:NAME");
  parser.AddChoice("--format", &format, {"text", "json"}, "json: GetServerInfoResponse, one line");
  parser.Add("--timeout", &timeout, "How long to wait for an answer");
  connection.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  InitLog("weft", "warn");
  InitGrpcLog();

  const absl::StatusOr<GrpcChannelOptions> options = connection.ChannelOptions();
  if (!options.ok()) {
    PrintErr("weft status: {}\n", std::string(options.status().message()));
    return kExitConfigError;
  }
  const auto stub = v1::Inference::NewStub(NewGrpcChannel(address, *options));
  const auto info = FetchServerInfo(*stub, timeout);
  if (!info.ok()) {
    PrintErr("weft status: {}: {}\n", address, std::string(info.status().message()));
    return 1;
  }
  PrintOut(format == "json" ? ServerInfoToJson(*info) + "\n" : FormatServerInfo(*info));
  return 0;
}

}  // namespace weft
