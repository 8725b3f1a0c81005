#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/buffer.h"
#include "kernels/device/device_stream.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft::kernels {

// An array that both the host and kernels use: one memory on the CPU, where copies are nothing;
// two on a device. Send() and Fetch() take effect in the order of the stream: the host leaves its
// side alone from there to the next Synchronize(). Movable. Allocates in Create() only.
template <typename T>
class Mirror {
 public:
  static absl::StatusOr<Mirror> Create(std::int64_t capacity, Stream& stream) {
    Mirror mirror;
    mirror.capacity_ = capacity;
    ASSIGN_OR_RETURN(mirror.buffer_,
                     Buffer::Allocate(capacity * static_cast<std::int64_t>(sizeof(T)), stream));
    mirror.host_ = mirror.buffer_.template as<T>();
    if (DeviceStream* const device = OnDevice(stream); device != nullptr && capacity > 0) {
      ASSIGN_OR_RETURN(mirror.owner_, AllocatePinned(*device, mirror.buffer_.size_bytes()));
      mirror.host_ = static_cast<T*>(mirror.owner_.get());
    }
    return mirror;
  }

  T* host() const { return host_; }                                 // [capacity]
  T* data() const { return buffer_.template as<T>(); }              // the same, for kernels
  std::int64_t size_bytes() const { return buffer_.size_bytes(); }  // of each

  absl::Status Send(std::int64_t count, Stream& stream) const {
    DCHECK(count <= capacity_);
    if (host() == data() || count == 0) return absl::OkStatus();
    return OnDevice(stream)->CopyToDevice(data(), host(), count * std::int64_t{sizeof(T)});
  }
  absl::Status Send(absl::Span<const T> values, Stream& stream) const {
    std::copy(values.begin(), values.end(), host());
    return Send(static_cast<std::int64_t>(values.size()), stream);
  }
  absl::Status Fetch(std::int64_t count, Stream& stream) const {
    DCHECK(count <= capacity_);
    if (host() == data() || count == 0) return absl::OkStatus();
    return OnDevice(stream)->CopyToHost(host(), data(), count * std::int64_t{sizeof(T)});
  }

 private:
  std::int64_t capacity_ = 0;
  Buffer buffer_;
  std::shared_ptr<void> owner_;  // of the host's side, where that is another
  T* host_ = nullptr;
};

}  // namespace weft::kernels
