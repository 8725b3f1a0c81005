#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/device_stream.h"

namespace weft::kernels {

enum class CudaModule : std::uint8_t { kCuda, kEmulated };

// Device `index` of this host, by libweft_cuda.so or libweft_cuda_emu.so: beside this program, in
// ../lib/weft, or where the loader looks. `host` outlives the result. UNIMPLEMENTED when there is
// no such module, FAILED_PRECONDITION "no CUDA device" when there is no GPU, INVALID_ARGUMENT when
// there are fewer. The module stays loaded.
absl::StatusOr<std::unique_ptr<DeviceStream>> OpenCudaDevice(CudaModule module, int index,
                                                             CpuStream& host);

}  // namespace weft::kernels
