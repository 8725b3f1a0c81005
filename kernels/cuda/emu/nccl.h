#pragma once

#include "kernels/cuda/nccl.h"

namespace weft::cuda_emu {

// NCCL over the emulated runtime, between the threads and processes of this machine, by shared
// memory. Collectives are as lazy as their streams and can be captured. What NCCL leaves to its
// callers is checked: ranks that do not make the same calls with the same counts and types get an
// error that names both, and memory has to be a device's: of a window, once the rank has
// registered any, whose sizes have to be the same on all ranks. What a rank waits for that is gone
// (ncclCommAbort()) is a remote error; of a process that was killed nobody is told.
kernels::cuda::NcclApi EmulatedNccl();

}  // namespace weft::cuda_emu
