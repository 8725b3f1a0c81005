#include <algorithm>
#include <string>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kMaxThreads = 1024;

// A block a head. Each thread keeps its kItems packs of the row in registers, so that the row is
// read once.
template <typename T, int kPack, int kItems>
__global__ void __launch_bounds__(kMaxThreads) RmsNormKernel(RmsNormParams<T> p) {
  WEFT_SHARED(float, scratch, 32);
  const std::int64_t at =
      std::int64_t{blockIdx.x} * p.row_stride + std::int64_t{blockIdx.y} * p.size;
  const int stride = static_cast<int>(blockDim.x) * kPack;
  const int first = static_cast<int>(threadIdx.x) * kPack;
  float values[kItems][kPack] = {};
  float squares = 0.0F;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = first + item * stride;
    if (i >= p.size) break;
    Pack<T, kPack> x = LoadPack<kPack>(p.x + at + i);
    if (p.residual != nullptr) {
      const Pack<T, kPack> residual = LoadPack<kPack>(p.residual + at + i);
      for (int j = 0; j < kPack; ++j) x.v[j] = Narrow<T>(Widen(x.v[j]) + Widen(residual.v[j]));
    }
    if (p.sum != nullptr) StorePack<kPack>(p.sum + at + i, x);
    for (int j = 0; j < kPack; ++j) {
      values[item][j] = Widen(x.v[j]);
      squares += values[item][j] * values[item][j];
    }
  }
  const float mean = BlockSum(squares, scratch) / static_cast<float>(p.size);
  const float scale = 1.0F / sqrtf(mean + p.eps);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int i = first + item * stride;
    if (i >= p.size) break;
    Pack<T, kPack> out;
    for (int j = 0; j < kPack; ++j) out.v[j] = Narrow<T>(values[item][j] * scale * p.weight[i + j]);
    StorePack<kPack>(p.out + at + i, out);
  }
}

template <typename T, int kPack>
absl::Status LaunchRmsNorm(const RmsNormParams<T>& p, CudaStream& stream) {
  const int packs = (p.size + kPack - 1) / kPack;
  const int threads = std::min(kMaxThreads, (packs + 31) / 32 * 32);
  const int items = (packs + threads - 1) / threads;
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.num_heads));
  const auto block = static_cast<unsigned>(threads);
  constexpr int kMaxItems = kMaxDeviceNormSize / kMaxThreads / kPack;
  if constexpr (kMaxItems > 4) {
    if (items > 4)
      return Launch<RmsNormKernel<T, kPack, 16>>("RmsNorm", grid, block, 0, stream.handle(), p);
  }
  if constexpr (kMaxItems > 2) {
    if (items > 2)
      return Launch<RmsNormKernel<T, kPack, 4>>("RmsNorm", grid, block, 0, stream.handle(), p);
  }
  if (items == 2)
    return Launch<RmsNormKernel<T, kPack, 2>>("RmsNorm", grid, block, 0, stream.handle(), p);
  return Launch<RmsNormKernel<T, kPack, 1>>("RmsNorm", grid, block, 0, stream.handle(), p);
}

// A warp a head; lane l has pairs l, l + 32, ...
constexpr int kRopeWarps = 4;
constexpr int kMaxPairs = kMaxDeviceRopeDim / 2 / 32;

template <typename T>
__global__ void __launch_bounds__(kRopeWarps * 32) RopeKernel(RopeParams<T> p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{blockIdx.x} * kRopeWarps + threadIdx.x / 32;
  if (index >= std::int64_t{p.num_rows} * p.num_heads) return;  // the whole warp
  const std::int64_t row = index / p.num_heads;
  const std::int64_t head = index % p.num_heads;
  const int half = p.head_dim / 2;
  const T* x = p.x + row * p.row_stride + head * p.head_stride;
  T* out = p.out + row * p.out_row_stride + head * p.out_head_stride;
  float a[kMaxPairs];
  float b[kMaxPairs];
  float squares = 0.0F;
#pragma unroll
  for (int item = 0; item < kMaxPairs; ++item) {
    const int i = lane + item * 32;
    a[item] = i < half ? Widen(x[i]) : 0.0F;
    b[item] = i < half ? Widen(x[half + i]) : 0.0F;
    squares += a[item] * a[item] + b[item] * b[item];
  }
  float scale = 1.0F;
  if (p.norm_weight != nullptr) {
    scale = 1.0F / sqrtf(WarpSum(squares) / static_cast<float>(p.head_dim) + p.eps);
  }
#pragma unroll
  for (int item = 0; item < kMaxPairs; ++item) {
    const int i = lane + item * 32;
    if (i >= half) continue;
    float first = a[item];
    float second = b[item];
    if (p.norm_weight != nullptr) {
      first *= scale * p.norm_weight[i];
      second *= scale * p.norm_weight[half + i];
    }
    const float cos = p.cos[row * half + i];
    const float sin = p.sin[row * half + i];
    out[i] = Narrow<T>(first * cos - second * sin);
    out[half + i] = Narrow<T>(second * cos + first * sin);
  }
}

constexpr int kThreads = 256;

template <typename T, int kPack>
__global__ void __launch_bounds__(kThreads) SiluMulKernel(SiluMulParams<T> p) {
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kPack;
  if (i >= p.size) return;
  const T* gate_up = p.gate_up + std::int64_t{blockIdx.x} * 2 * p.size + i;
  const Pack<T, kPack> gate = LoadPack<kPack>(gate_up);
  const Pack<T, kPack> up = LoadPack<kPack>(gate_up + p.size);
  Pack<T, kPack> out;
  for (int j = 0; j < kPack; ++j) {
    const float x = Widen(gate.v[j]);
    out.v[j] = Narrow<T>(x / (1.0F + expf(-x)) * Widen(up.v[j]));
  }
  StorePack<kPack>(p.out + std::int64_t{blockIdx.x} * p.size + i, out);
}

template <typename T, int kPack>
__global__ void __launch_bounds__(kThreads) GatherRowsKernel(GatherRowsParams<T> p) {
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kPack;
  if (i >= p.size) return;
  const std::int64_t from = std::int64_t{p.index[blockIdx.x]} * p.size;
  StorePack<kPack>(p.out + std::int64_t{blockIdx.x} * p.size + i, LoadPack<kPack>(p.in + from + i));
}

// Rows by blocks of kThreads packs.
dim3 GridOfRows(std::int32_t num_rows, std::int32_t size, int pack) {
  const int per_block = kThreads * pack;
  return dim3(static_cast<unsigned>(num_rows),
              static_cast<unsigned>((size + per_block - 1) / per_block));
}

// The kernel of packs where `in` and p.out are aligned for them, else that of single values.
template <auto kPacked, auto kSingle, typename T, typename Params>
absl::Status LaunchOverRows(const char* name, const T* in, const Params& p, CudaStream& stream) {
  if (p.num_rows == 0 || p.size == 0) return absl::OkStatus();
  if (PacksFit(in, p.size, 0) && PacksFit(p.out, p.size, 0)) {
    return Launch<kPacked>(name, GridOfRows(p.num_rows, p.size, kPackOf<T>), kThreads, 0,
                           stream.handle(), p);
  }
  return Launch<kSingle>(name, GridOfRows(p.num_rows, p.size, 1), kThreads, 0, stream.handle(), p);
}

}  // namespace

template <typename T>
absl::Status RmsNorm(const RmsNormParams<T>& params, CudaStream& stream) {
  if (params.size < 1 || params.size > kMaxDeviceNormSize) {
    return absl::InvalidArgumentError("RmsNorm: size is " + std::to_string(params.size) +
                                      "; allowed are 1 to " + std::to_string(kMaxDeviceNormSize));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  RmsNormParams<T> p = params;
  if (p.row_stride == 0) p.row_stride = std::int64_t{p.num_heads} * p.size;
  bool packs = PacksFit(p.x, p.size, p.row_stride) && PacksFit(p.out, p.size, p.row_stride);
  packs = packs && PacksFit(p.residual, 0, 0) && PacksFit(p.sum, 0, 0);
  return packs ? LaunchRmsNorm<T, kPackOf<T>>(p, stream) : LaunchRmsNorm<T, 1>(p, stream);
}

template <typename T>
absl::Status Rope(const RopeParams<T>& params, CudaStream& stream) {
  if (params.head_dim % 2 != 0 || params.head_dim < 2 || params.head_dim > kMaxDeviceRopeDim) {
    return absl::InvalidArgumentError("Rope: head_dim is " + std::to_string(params.head_dim) +
                                      "; allowed are even ones from 2 to " +
                                      std::to_string(kMaxDeviceRopeDim));
  }
  RopeParams<T> p = params;
  if (p.head_stride == 0) p.head_stride = p.head_dim;
  if (p.out == nullptr) {
    p.out = p.x;
    p.out_row_stride = p.row_stride;
    p.out_head_stride = p.head_stride;
  }
  const std::int64_t heads = std::int64_t{p.num_rows} * p.num_heads;
  if (heads == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>((heads + kRopeWarps - 1) / kRopeWarps);
  return Launch<RopeKernel<T>>("Rope", blocks, kRopeWarps * 32, 0, stream.handle(), p);
}

template <typename T>
absl::Status SiluMul(const SiluMulParams<T>& p, CudaStream& stream) {
  return LaunchOverRows<SiluMulKernel<T, kPackOf<T>>, SiluMulKernel<T, 1>>("SiluMul", p.gate_up, p,
                                                                           stream);
}

template <typename T>
absl::Status GatherRows(const GatherRowsParams<T>& p, CudaStream& stream) {
  return LaunchOverRows<GatherRowsKernel<T, kPackOf<T>>, GatherRowsKernel<T, 1>>("GatherRows", p.in,
                                                                                 p, stream);
}

#define WEFT_INSTANTIATE(T)                                               \
  template absl::Status RmsNorm<T>(const RmsNormParams<T>&, CudaStream&); \
  template absl::Status Rope<T>(const RopeParams<T>&, CudaStream&);       \
  template absl::Status SiluMul<T>(const SiluMulParams<T>&, CudaStream&); \
  template absl::Status GatherRows<T>(const GatherRowsParams<T>&, CudaStream&)
WEFT_INSTANTIATE(float);
WEFT_INSTANTIATE(BFloat16);
WEFT_INSTANTIATE(Float16);

}  // namespace weft::kernels::cuda
