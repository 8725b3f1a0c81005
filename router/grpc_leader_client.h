#pragma once

#include <memory>
#include <string>

#include "router/leader_client.h"
#include "server/grpc_server.h"

namespace weft {

// A channel to the leader at `address`. Requests share a Worker.Generate stream; one of more than
// 256 KiB has its own.
std::unique_ptr<LeaderClient> NewGrpcLeaderClient(const std::string& address,
                                                  const GrpcChannelOptions& options);

}  // namespace weft
