#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace weft {

// Where a process is, as far as it matters to those who talk to it over UCX.
struct ProcessPlace {
  std::uint64_t shared_memory;  // equal: the same host and IPC namespace
  std::uint64_t network;        // equal, on one host: the same network namespace
  std::uint64_t processes;      // equal, on one host: the same PID namespace
  std::uint64_t host;           // equal: the same boot of the same host
  std::int64_t pid;             // in its PID namespace
};

ProcessPlace OwnPlace();

// False for two that UCX connects through shared memory without being able to wake a sleeper: it
// does that through an abstract Unix socket, which only processes of one network namespace reach
// (measured: such a sleeper slept on until its time was up).
bool CanWake(const ProcessPlace& a, const ProcessPlace& b);

// A descriptor that becomes readable when the process at `place` exits, to be closed by the
// caller; -1 if it is this process or cannot be seen from here.
int WatchProcess(const ProcessPlace& place);

// The address of a fabric: where it is, and UCX's own address. Anybody who reaches UCX's port may
// connect to it; a fabric hears only those who send its key, which is in no other place than here.
struct FabricAddress {
  ProcessPlace place;
  std::string_view ucx;
  std::uint64_t key = 0;
};

std::string EncodeFabricAddress(const FabricAddress& address);

// INVALID_ARGUMENT if it is not one or was damaged on the way: UCX would crash on that. `text` must
// outlive the result.
absl::StatusOr<FabricAddress> DecodeFabricAddress(std::string_view text);

}  // namespace weft
