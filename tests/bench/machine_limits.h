#pragma once

#include "kernels/device/stream.h"

namespace weft::kernels {

// What this machine gives right now, by small loops on all threads of `stream`: the best of a few
// short tries. Machines drift and are shared: measure next to the kernel that is compared.
struct MachineLimits {
  double flops_per_second;  // fp32 multiply-adds of the CPU target in use
  double bytes_per_second;  // reads of memory that no cache holds
};

MachineLimits MeasureMachineLimits(CpuStream& stream);

// A clock for launches on `stream`. With one thread it is that thread's CPU time, so that other
// programs on the machine disturb little; else the wall's.
double NowSeconds(const CpuStream& stream);

}  // namespace weft::kernels
