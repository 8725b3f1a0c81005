#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/types/span.h"

namespace weft {

// The memory of a process of this host, to read KV out of it: a copy less than any message takes,
// and nobody writes into anybody's memory (shared memory of UCX cannot be used between groups: see
// MakeUcxFabric()). What was read may have changed meanwhile: whoever reads has to check.
//
// Needs the kernel's leave (ptrace's rules), so callers try it with something they know.
class KvPeerMemory {
 public:
  // None when the process of a UCX fabric's address is not of this host and PID namespace, or gone.
  static std::optional<KvPeerMemory> Open(std::string_view fabric_address);
  ~KvPeerMemory();
  KvPeerMemory(KvPeerMemory&& other) noexcept;
  KvPeerMemory& operator=(KvPeerMemory&& other) noexcept;

  // False if not all of it could be read, or the process has ended.
  bool Read(std::uint64_t address, absl::Span<std::byte> out) const;

 private:
  KvPeerMemory(std::int64_t pid, int descriptor) : pid_(pid), descriptor_(descriptor) {}

  std::int64_t pid_;
  int descriptor_;  // pidfd: the id is not given to another process while we look
};

}  // namespace weft
