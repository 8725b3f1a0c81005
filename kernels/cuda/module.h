#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/device_stream.h"

// What a module (libweft_cuda.so) has for the program that opens it. Both come from one build: the
// version guards against files of two.

namespace weft::kernels {

inline constexpr int kDeviceModuleVersion = 1;
using OpenedDevice = absl::StatusOr<std::unique_ptr<DeviceStream>>;

}  // namespace weft::kernels

extern "C" {
int weft_device_module_version();
// See CudaDevice::Open().
void weft_open_device(int index, weft::kernels::CpuStream* host,
                      weft::kernels::OpenedDevice* opened);
}
