#include "kernels/device/vector.h"

#include <cstring>

#include "kernels/device/device_stream.h"
#include "server/base/status_macros.h"

namespace weft::kernels {

absl::StatusOr<Vector> Vector::Create(absl::Span<const float> values, Stream& stream) {
  Vector vector;
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(float));
  if (bytes == 0) return vector;
  ASSIGN_OR_RETURN(vector.buffer_, Buffer::Allocate(bytes, stream));
  if (DeviceStream* const device = OnDevice(stream)) {
    RETURN_IF_ERROR(device->CopyToDevice(vector.buffer_.data(), values.data(), bytes));
    RETURN_IF_ERROR(device->Synchronize());
  } else {
    std::memcpy(vector.buffer_.data(), values.data(), values.size() * sizeof(float));
  }
  return vector;
}

}  // namespace weft::kernels
