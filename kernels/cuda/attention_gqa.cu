#include "kernels/cuda/attention_mma.h"

// Grouped queries on tensor cores.

namespace weft::kernels::cuda {
namespace {

template <typename Kv, int kHeadDim>
absl::Status LaunchFor(const TensorCoreAttention& p, void* workspace, CudaStream& stream) {
  if (PrefersManySlots(p.geometry)) {
    return LaunchTensorCore<MmaShape<Kv, kHeadDim, kHeadDim, 64>>(p, workspace, stream);
  }
  return LaunchTensorCore<MmaShape<Kv, kHeadDim, kHeadDim, 16>>(p, workspace, stream);
}

}  // namespace

absl::Status GqaOnTensorCores(const TensorCoreAttention& p, void* workspace, CudaStream& stream) {
  const bool bf16 = p.geometry.kv_dtype == DType::kBFloat16;
  if (p.geometry.head_dim == 64) {
    return bf16 ? LaunchFor<BFloat16, 64>(p, workspace, stream)
                : LaunchFor<Float16, 64>(p, workspace, stream);
  }
  return bf16 ? LaunchFor<BFloat16, 128>(p, workspace, stream)
              : LaunchFor<Float16, 128>(p, workspace, stream);
}

std::int64_t GqaTensorCoreWorkspaceBytes(std::int32_t head_dim) {
  if (head_dim == 64) {
    return std::max(SplitWorkspaceBytes<MmaShape<BFloat16, 64, 64, 16>>(),
                    SplitWorkspaceBytes<MmaShape<BFloat16, 64, 64, 64>>());
  }
  return std::max(SplitWorkspaceBytes<MmaShape<BFloat16, 128, 128, 16>>(),
                  SplitWorkspaceBytes<MmaShape<BFloat16, 128, 128, 64>>());
}

}  // namespace weft::kernels::cuda
