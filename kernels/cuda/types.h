#pragma once

#include <cstdint>

// Values of the CUDA kernels' activations, as they are stored. Sums are fp32.

namespace weft::kernels::cuda {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

}  // namespace weft::kernels::cuda
