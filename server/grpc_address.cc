#include "server/grpc_address.h"

#include <algorithm>

#include "fmt/format.h"
#include "server/base/quoted.h"

namespace weft {

// The last colon splits: "[::1]:80" has others.
absl::Status CheckGrpcAddress(const std::string& address, int min_port) {
  if (address.starts_with(kUnixAbstract)) {
    const std::size_t size = address.size() - kUnixAbstract.size();
    if (size > 0 && size <= 100) return {};
    return absl::InvalidArgumentError(fmt::format(
        "address {}: the name after {} has 1 to 100 bytes", Quoted(address), kUnixAbstract));
  }
  const std::size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits =
      !port.empty() && port.size() <= 5 &&
      std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (digits && colon > 0 && std::stoi(port) >= min_port && std::stoi(port) <= 65535) return {};
  return absl::InvalidArgumentError(
      fmt::format("address {} is neither HOST:PORT with a port of {} to 65535 nor {}NAME",
                  Quoted(address), min_port, kUnixAbstract));
}

}  // namespace weft
