#include "worker/group/shared_windows.h"

#include <sys/ipc.h>
#include <sys/shm.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "fmt/format.h"
#include "server/base/draw.h"
#include "server/base/log.h"

namespace weft {
namespace {

// What precedes the memory in a segment: the key, and nothing up to the next cache line.
constexpr std::int64_t kHeaderBytes = 64;

std::shared_ptr<std::byte> Map(int id, int flags) {
  void* const memory = shmat(id, nullptr, flags);
  if (memory == reinterpret_cast<void*>(-1)) return nullptr;
  return {static_cast<std::byte*>(memory), [](std::byte* mapped) { shmdt(mapped); }};
}

}  // namespace

absl::StatusOr<kernels::Buffer> SharedWindows::Allocate(std::int64_t bytes) {
  if (bytes <= 0 || num_windows_ == kMaxWindows) return kernels::Buffer::Allocate(bytes);
  // The other ranks have a window here, and are to see when this one has none.
  Handle& handle = handles_[num_windows_];
  Segment& segment = segments_[rank_][num_windows_++];
  const int id = shmget(IPC_PRIVATE, static_cast<std::size_t>(bytes + kHeaderBytes), 0600);
  if (id >= 0) segment = Map(id, 0);
  if (segment == nullptr) {
    spdlog::info("no shared memory of {} bytes ({}): ranks send it to each other", bytes,
                 std::strerror(errno));
  }
  if (id >= 0) shmctl(id, IPC_RMID, nullptr);
  if (segment == nullptr) return kernels::Buffer::Allocate(bytes);
  handle = {.key = DrawUint64(), .bytes = bytes, .id = id};
  std::memcpy(segment.get(), &handle.key, sizeof(handle.key));
  return kernels::Buffer::Of(std::shared_ptr<void>(segment, segment.get() + kHeaderBytes), bytes);
}

absl::Status SharedWindows::Attach(int r, const Handles& handles) {
  std::array<Segment, kMaxWindows> segments;
  for (std::size_t window = 0; window < kMaxWindows; ++window) {
    const Handle& theirs = handles[window];
    if (theirs.bytes != handles_[window].bytes) {
      return absl::FailedPreconditionError(fmt::format("window {} has {} bytes there and {} here",
                                                       window, theirs.bytes,
                                                       handles_[window].bytes));
    }
    if (window >= num_windows_) continue;
    if (theirs.bytes == 0) {
      return absl::FailedPreconditionError(fmt::format("window {} could not be made", window));
    }
    shmid_ds found{};
    if (shmctl(theirs.id, IPC_STAT, &found) == 0 &&
        found.shm_segsz >= static_cast<std::size_t>(theirs.bytes + kHeaderBytes)) {
      segments[window] = Map(theirs.id, SHM_RDONLY);
    }
    if (segments[window] == nullptr ||
        std::memcmp(segments[window].get(), &theirs.key, sizeof(theirs.key)) != 0) {
      return absl::FailedPreconditionError(
          fmt::format("window {} is not in this IPC namespace, or of another user", window));
    }
  }
  segments_[static_cast<std::size_t>(r)] = std::move(segments);
  return absl::OkStatus();
}

std::optional<SharedWindows::Place> SharedWindows::Find(const void* data,
                                                        std::int64_t bytes) const {
  for (std::size_t window = 0; window < num_windows_; ++window) {
    const Segment& segment = segments_[rank_][window];
    if (segment == nullptr) continue;
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(data) -
                                 reinterpret_cast<std::uintptr_t>(segment.get() + kHeaderBytes);
    if (const Place place = {window, offset}; Fits(place, bytes)) return place;
  }
  return std::nullopt;
}

bool SharedWindows::Fits(const Place& place, std::int64_t bytes) const {
  if (place.window >= num_windows_) return false;
  const std::int64_t size = handles_[place.window].bytes;
  return bytes >= 0 && bytes <= size && place.offset <= static_cast<std::uint64_t>(size - bytes);
}

const std::byte* SharedWindows::At(int r, const Place& place, std::int64_t bytes) const {
  if (!Fits(place, bytes) || place.offset % alignof(float) != 0) return nullptr;
  const Segment& segment = segments_[static_cast<std::size_t>(r)][place.window];
  return segment == nullptr ? nullptr : segment.get() + kHeaderBytes + place.offset;
}

}  // namespace weft
