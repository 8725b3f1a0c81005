#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace weft {

// An address of this host that has a name and no port: gRPC knows them by this prefix.
inline constexpr std::string_view kUnixAbstract = "unix-abstract:";

// INVALID_ARGUMENT unless `address` is HOST:PORT, the port `min_port` to 65535 (0 to listen: any
// that is free), or unix-abstract:NAME.
absl::Status CheckGrpcAddress(const std::string& address, int min_port);

}  // namespace weft
