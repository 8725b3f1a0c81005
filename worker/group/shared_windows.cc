#include "worker/group/shared_windows.h"

#include <string_view>
#include <utility>

#include "fmt/format.h"
#include "server/base/draw.h"
#include "server/base/log.h"

namespace weft {

absl::StatusOr<kernels::Buffer> SharedWindows::Allocate(std::int64_t bytes) {
  if (bytes <= 0 || num_windows_ == kMaxWindows) return kernels::Buffer::Allocate(bytes);
  // The other ranks have a window here, and are to see when this one has none.
  const std::size_t window = num_windows_++;
  const std::uint64_t key = DrawUint64();
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create(bytes, key);
  if (!memory.ok()) {
    spdlog::info(
        "ranks send each other all activations: {}",
        std::string_view(memory.status().message().data(), memory.status().message().size()));
    return kernels::Buffer::Allocate(bytes);
  }
  own_[window] = std::make_shared<SharedMemory>(*std::move(memory));
  handles_.windows[window] = {.key = key, .bytes = bytes, .descriptor = own_[window]->descriptor()};
  return kernels::Buffer::Of(std::shared_ptr<void>(own_[window], own_[window]->bytes().data()),
                             bytes);
}

absl::Status SharedWindows::Attach(int r, const Handles& handles) {
  Mapped mapped;
  for (std::size_t i = 0; i < kMaxWindows; ++i) {
    const Handles::Window& theirs = handles.windows[i];
    if (theirs.bytes != handles_.windows[i].bytes) {
      return absl::FailedPreconditionError(fmt::format("window {} has {} bytes there and {} here",
                                                       i, theirs.bytes, handles_.windows[i].bytes));
    }
    if (i >= num_windows_) continue;
    if (theirs.bytes == 0) {
      return absl::FailedPreconditionError(fmt::format("window {} could not be made", i));
    }
    mapped[i] = PeerMemory::Open(handles.place, theirs.key, static_cast<int>(theirs.descriptor));
    if (!mapped[i].has_value() ||
        mapped[i]->bytes().size() != static_cast<std::size_t>(theirs.bytes)) {
      return absl::FailedPreconditionError(
          fmt::format("window {} is not in this PID namespace, or of another user", i));
    }
  }
  peers_[static_cast<std::size_t>(r)] = std::move(mapped);
  return absl::OkStatus();
}

std::optional<SharedWindows::Place> SharedWindows::Find(const void* data,
                                                        std::int64_t bytes) const {
  for (std::size_t window = 0; window < num_windows_; ++window) {
    if (own_[window] == nullptr) continue;
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(data) -
                                 reinterpret_cast<std::uintptr_t>(own_[window]->bytes().data());
    if (const Place place = {window, offset}; Fits(place, bytes)) return place;
  }
  return std::nullopt;
}

bool SharedWindows::Fits(const Place& place, std::int64_t bytes) const {
  if (place.window >= num_windows_) return false;
  const std::int64_t size = handles_.windows[place.window].bytes;
  return bytes >= 0 && bytes <= size && place.offset <= static_cast<std::uint64_t>(size - bytes);
}

const std::byte* SharedWindows::At(int r, const Place& place, std::int64_t bytes) const {
  if (!Fits(place, bytes) || place.offset % alignof(float) != 0) return nullptr;
  const std::optional<PeerMemory>& memory = peers_[static_cast<std::size_t>(r)][place.window];
  return memory.has_value() ? memory->bytes().data() + place.offset : nullptr;
}

}  // namespace weft
