#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weft {

// A mapping of shared memory, unmapped at the end. Movable.
class KvMapping {
 public:
  KvMapping() = default;
  explicit KvMapping(absl::Span<std::byte> bytes) : bytes_(bytes) {}
  ~KvMapping();
  KvMapping(KvMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  KvMapping& operator=(KvMapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  absl::Span<std::byte> bytes_;
};

// Memory of a rank that sends, which ranks of other groups on this host may map and read: a copy
// less than any message takes. Nobody else writes there (shared memory of UCX cannot be used
// between groups: see MakeUcxFabric()). What is read may change meanwhile: whoever reads has to
// check.
class KvStaging {
 public:
  // Zeroed. `fabric_address`: of its owner, by which readers know it.
  static absl::StatusOr<KvStaging> Create(std::int64_t bytes, std::string_view fabric_address);
  ~KvStaging();
  KvStaging(KvStaging&& other) noexcept;
  KvStaging& operator=(KvStaging&&) = delete;

  absl::Span<std::byte> bytes() const;
  // By which others open it.
  int descriptor() const { return descriptor_; }

 private:
  KvStaging(KvMapping mapping, int descriptor)
      : mapping_(std::move(mapping)), descriptor_(descriptor) {}

  KvMapping mapping_;
  int descriptor_;
};

// The other side: the KvStaging of another rank, to be read. It stays when its owner ends.
class KvPeerMemory {
 public:
  // None when the owner of `fabric_address` is not of this host and PID namespace, or the kernel
  // does not let us (ptrace's rules for reading), or `descriptor` is not its KvStaging.
  static std::optional<KvPeerMemory> Open(std::string_view fabric_address, int descriptor);

  absl::Span<const std::byte> bytes() const;

 private:
  explicit KvPeerMemory(KvMapping mapping) : mapping_(std::move(mapping)) {}

  KvMapping mapping_;
};

// What was written or read before is so, for other processes, before what comes after.
void FenceKvMemory();

}  // namespace weft
