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

namespace weft {

// Memory of a rank that the other ranks of its host can read where it lies: of the same user, in
// the same IPC namespace. In System V segments, which are marked for removal within microseconds of
// being made: from then on the kernel frees them with the last process that has them, however it
// dies. Others map them to read only. In pages of the usual size.
//
// Threading: one thread. The memory of Allocate() stays mapped as long as this, and until it is
// given back, on any thread.
class SharedWindows {
 public:
  static constexpr std::size_t kMaxWindows = 8;

  // What another rank needs to find a window; none if `bytes` is 0.
  struct Handle {
    std::uint64_t key = 0;  // begins the segment: elsewhere its id may be another one's
    std::int64_t bytes = 0;
    std::int32_t id = -1;
    std::uint32_t unused = 0;
  };
  using Handles = std::array<Handle, kMaxWindows>;

  struct Place {
    std::uint64_t window = 0;
    std::uint64_t offset = 0;
  };

  SharedWindows(int rank, int size)
      : rank_(static_cast<std::size_t>(rank)), segments_(static_cast<std::size_t>(size)) {}

  // A window, in order, or memory of this process alone: of no bytes, beyond kMaxWindows, or where
  // the system gives no segment. Errors as those of Buffer::Allocate().
  absl::StatusOr<kernels::Buffer> Allocate(std::int64_t bytes);

  // Whether this rank has been asked for none.
  bool empty() const { return num_windows_ == 0; }
  // Of this rank's windows.
  const Handles& handles() const { return handles_; }

  // Maps the windows of rank `r`, which has as many as this one and of the same sizes.
  // FAILED_PRECONDITION if that is not so, or one cannot be had here.
  absl::Status Attach(int r, const Handles& handles);

  // Where memory of this rank lies; none if it is not in a window.
  std::optional<Place> Find(const void* data, std::int64_t bytes) const;

  // `bytes` of rank r's memory; null if they are not in what Attach() has mapped, or no float could
  // be there.
  const std::byte* At(int r, const Place& place, std::int64_t bytes) const;

 private:
  using Segment = std::shared_ptr<std::byte>;

  bool Fits(const Place& place, std::int64_t bytes) const;

  const std::size_t rank_;
  Handles handles_;
  std::size_t num_windows_ = 0;
  std::vector<std::array<Segment, kMaxWindows>> segments_;  // by rank
};

}  // namespace weft
