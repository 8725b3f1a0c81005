#include "kernels/device/stream.h"

#include <string>

#include "kernels/device/cpu_target.h"
#include "server/base/check.h"

namespace weft::kernels {

CpuStream::CpuStream(int num_threads) : pool_(num_threads) {
  const absl::Status status = InitCpuTarget();
  CHECK_MSG(status.ok(), std::string(status.message()));
}

}  // namespace weft::kernels
