#pragma once

#include "kernels/device/stream.h"
#include "kernels/dtype.h"

namespace weft::kernels {

// What this machine gives right now, by small loops on all threads of `stream`: the best of a few
// short tries. Machines drift and are shared: measure next to the kernel that is compared.
struct MachineLimits {
  double flops_per_second = 0;      // fp32 multiply-adds of the CPU target in use
  double dot_flops_per_second = 0;  // its dot products of bfloat16; 0 without them
  double bytes_per_second = 0;      // reads of memory that no cache holds

  // What a product with weights of `format` is up against.
  double PeakOf(WeightFormat format) const {
    const bool dots = format != WeightFormat::kFloat32 && format != WeightFormat::kFloat16;
    return dots && dot_flops_per_second > 0 ? dot_flops_per_second : flops_per_second;
  }
};

MachineLimits MeasureMachineLimits(CpuStream& stream);

// A clock for launches on `stream`. With one thread it is that thread's CPU time, so that other
// programs on the machine disturb little; else the wall's.
double NowSeconds(const CpuStream& stream);

}  // namespace weft::kernels
