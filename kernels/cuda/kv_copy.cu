#include <string>

#include "kernels/cuda/kv_copy.h"
#include "kernels/cuda/types.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kWarps = 8;

struct alignas(16) Pack {
  std::uint32_t words[4];
};

// A warp a segment.
template <typename Value>
__global__ void __launch_bounds__(kWarps * 32) KvCopyKernel(KvCopyParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (index >= p.num_segments) return;
  const KvSegment segment = p.segments[index];
  std::byte* place = p.kv + segment.place;
  std::byte* wire = p.wire + segment.wire;
  const bool gathers = p.direction == KvCopyDirection::kGather;
  const auto bytes = segment.count * static_cast<int>(sizeof(Value));
  const auto alignment = reinterpret_cast<std::uintptr_t>(place) |
                         reinterpret_cast<std::uintptr_t>(wire) | static_cast<unsigned>(bytes);
  if (segment.wire_stride == 1 && alignment % sizeof(Pack) == 0) {
    auto* to = reinterpret_cast<Pack*>(gathers ? wire : place);
    const auto* from = reinterpret_cast<const Pack*>(gathers ? place : wire);
    for (int i = lane; i < bytes / static_cast<int>(sizeof(Pack)); i += 32) to[i] = from[i];
    return;
  }
  auto* values = reinterpret_cast<Value*>(place);
  auto* strided = reinterpret_cast<Value*>(wire);
  for (int i = lane; i < segment.count; i += 32) {
    const std::int64_t at = std::int64_t{i} * segment.wire_stride;
    if (gathers) {
      strided[at] = values[i];
    } else {
      values[i] = strided[at];
    }
  }
}

}  // namespace

absl::Status KvCopy(const KvCopyParams& p, CudaStream& stream) {
  if (p.num_segments == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>((p.num_segments + kWarps - 1) / kWarps);
  switch (p.value_bytes) {
    case 2:
      return Launch<KvCopyKernel<std::uint16_t>>("KvCopy", blocks, kWarps * 32, 0, stream.handle(),
                                                 p);
    case 4:
      return Launch<KvCopyKernel<std::uint32_t>>("KvCopy", blocks, kWarps * 32, 0, stream.handle(),
                                                 p);
  }
  return absl::InvalidArgumentError("KvCopy: values of " + std::to_string(p.value_bytes) +
                                    " bytes; 2 and 4 are supported");
}

}  // namespace weft::kernels::cuda
