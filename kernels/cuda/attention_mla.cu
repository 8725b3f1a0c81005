#include "kernels/cuda/attention_mma.h"

// Latents of 512 + 64 on tensor cores: a token's V is the first 512 of its K, which is loaded once.

namespace weft::kernels::cuda {
namespace {

template <typename Kv>
absl::Status LaunchFor(const TensorCoreAttention& p, void* workspace, CudaStream& stream) {
  if (PrefersManySlots(p.geometry)) {
    return LaunchTensorCore<MmaShape<Kv, 576, 512, 64>>(p, workspace, stream);
  }
  return LaunchTensorCore<MmaShape<Kv, 576, 512, 16>>(p, workspace, stream);
}

}  // namespace

absl::Status MlaOnTensorCores(const TensorCoreAttention& p, void* workspace, CudaStream& stream) {
  return p.geometry.kv_dtype == DType::kBFloat16 ? LaunchFor<BFloat16>(p, workspace, stream)
                                                 : LaunchFor<Float16>(p, workspace, stream);
}

std::int64_t MlaTensorCoreWorkspaceBytes() {
  return std::max(SplitWorkspaceBytes<MmaShape<BFloat16, 576, 512, 16>>(),
                  SplitWorkspaceBytes<MmaShape<BFloat16, 576, 512, 64>>());
}

}  // namespace weft::kernels::cuda
