#include "kernels/cuda/linear.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename W>
__global__ void __launch_bounds__(kThreads) EmbeddingKernel(EmbeddingParams<W> p) {
  const auto i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= p.size) return;
  const std::int64_t row = std::int64_t{p.ids[blockIdx.x]} - p.first_row;
  const bool here = row >= 0 && row < p.num_weight_rows;
  p.out[std::int64_t{blockIdx.x} * p.size + i] = here ? Widen(p.weight[row * p.size + i]) : 0.0F;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) RoundRowsKernel(RoundRowsParams<T> p) {
  const auto i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= p.size) return;
  p.out[std::int64_t{blockIdx.x} * p.size + i] =
      Narrow<T>(p.x[std::int64_t{blockIdx.x} * p.x_stride + i]);
}

dim3 GridOf(std::int32_t num_rows, std::int32_t size) {
  return dim3(static_cast<unsigned>(num_rows),
              static_cast<unsigned>((size + kThreads - 1) / kThreads));
}

}  // namespace

template <typename W>
absl::Status Embedding(const EmbeddingParams<W>& p, CudaStream& stream) {
  if (p.num_rows == 0) return absl::OkStatus();
  return Launch<EmbeddingKernel<W>>("Embedding", GridOf(p.num_rows, p.size), kThreads, 0,
                                    stream.handle(), p);
}

template <typename T>
absl::Status RoundRows(const RoundRowsParams<T>& p, CudaStream& stream) {
  if (p.num_rows == 0) return absl::OkStatus();
  return Launch<RoundRowsKernel<T>>("RoundRows", GridOf(p.num_rows, p.size), kThreads, 0,
                                    stream.handle(), p);
}

template absl::Status Embedding<float>(const EmbeddingParams<float>&, CudaStream&);
template absl::Status Embedding<BFloat16>(const EmbeddingParams<BFloat16>&, CudaStream&);
template absl::Status Embedding<Float16>(const EmbeddingParams<Float16>&, CudaStream&);
template absl::Status RoundRows<BFloat16>(const RoundRowsParams<BFloat16>&, CudaStream&);
template absl::Status RoundRows<Float16>(const RoundRowsParams<Float16>&, CudaStream&);

}  // namespace weft::kernels::cuda
