#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/group/ucx_address.h"

namespace weft {

// A mapping of shared memory, unmapped at the end. Movable.
class SharedMapping {
 public:
  SharedMapping() = default;
  explicit SharedMapping(absl::Span<std::byte> bytes) : bytes_(bytes) {}
  ~SharedMapping();
  SharedMapping(SharedMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  absl::Span<std::byte> bytes_;
};

// Memory of a rank that other ranks on this host, of this group and of others, may map and read: a
// copy less than any message takes. Nobody else writes there (shared memory of UCX cannot be used
// between groups: see MakeUcxFabric()), and the kernel frees it with the last process that has it,
// however it dies. What is read may change meanwhile: whoever reads has to check.
class SharedMemory {
 public:
  // Zeroed, 64-byte aligned. `key`: by which readers know it.
  static absl::StatusOr<SharedMemory> Create(std::int64_t bytes, std::uint64_t key);
  // By the key of its owner's `fabric_address`.
  static absl::StatusOr<SharedMemory> Create(std::int64_t bytes, std::string_view fabric_address);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;

  absl::Span<std::byte> bytes() const;
  // By which others open it.
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(SharedMapping mapping, int descriptor)
      : mapping_(std::move(mapping)), descriptor_(descriptor) {}

  SharedMapping mapping_;
  int descriptor_;
};

// The other side: the SharedMemory of another rank, to be read. It stays when its owner ends.
class PeerMemory {
 public:
  // None when `owner` is not of this host and PID namespace, or the kernel does not let us
  // (ptrace's rules for reading), or `descriptor` is not its SharedMemory with that key.
  static std::optional<PeerMemory> Open(const ProcessPlace& owner, std::uint64_t key,
                                        int descriptor);
  // Of the owner of `fabric_address`.
  static std::optional<PeerMemory> Open(std::string_view fabric_address, int descriptor);

  absl::Span<const std::byte> bytes() const;

 private:
  explicit PeerMemory(SharedMapping mapping) : mapping_(std::move(mapping)) {}

  SharedMapping mapping_;
};

// What was written or read before is so, for other processes, before what comes after.
void FenceSharedMemory();

}  // namespace weft
