#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "worker/group/shared_memory.h"
#include "worker/group/ucx_address.h"

namespace weft {

// Memory of the ranks of a group that they read where it lies, on one host, in one PID namespace
// (shared_memory.h).
//
// Threading: one thread. The memory of Allocate() stays mapped as long as this, and until it is
// given back, on any thread.
class SharedWindows {
 public:
  static constexpr std::size_t kMaxWindows = 8;

  // What other ranks need to find this one's.
  struct Handles {
    struct Window {
      std::uint64_t key = 0;
      std::int64_t bytes = 0;  // 0: none
      std::int64_t descriptor = -1;
    };
    ProcessPlace place{};
    std::array<Window, kMaxWindows> windows;
  };

  struct Place {
    std::uint64_t window = 0;
    std::uint64_t offset = 0;
  };

  explicit SharedWindows(int size) : peers_(static_cast<std::size_t>(size)) {
    handles_.place = OwnPlace();
  }

  // A window, in order, or memory of this process alone: of no bytes, beyond kMaxWindows, or where
  // the system gives no shared memory. Errors as those of Buffer::Allocate().
  absl::StatusOr<kernels::Buffer> Allocate(std::int64_t bytes);

  // Whether this rank has been asked for none.
  bool empty() const { return num_windows_ == 0; }
  const Handles& handles() const { return handles_; }

  // Maps the windows of rank `r`, which has as many as this one and of the same sizes.
  // FAILED_PRECONDITION if that is not so, or one cannot be had here.
  absl::Status Attach(int r, const Handles& handles);

  // Where memory of this rank lies; none if it is not in a window.
  std::optional<Place> Find(const void* data, std::int64_t bytes) const;

  // `bytes` of another rank's memory; null if they are not in what Attach() has mapped, or no float
  // could be there.
  const std::byte* At(int r, const Place& place, std::int64_t bytes) const;

 private:
  using Mapped = std::array<std::optional<PeerMemory>, kMaxWindows>;

  bool Fits(const Place& place, std::int64_t bytes) const;

  Handles handles_;
  std::size_t num_windows_ = 0;
  std::array<std::shared_ptr<SharedMemory>, kMaxWindows> own_;
  std::vector<Mapped> peers_;  // by rank
};

}  // namespace weft
