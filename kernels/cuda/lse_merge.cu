#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ float EmptyLse() { return -INFINITY; }

// The largest LSE of the parts and the sum of exp(lse - max), in part order.
struct Total {
  float max;
  float sum;

  __device__ float Weight(float lse) const {
    return max == EmptyLse() ? 0.0F : expf(lse - max) / sum;
  }
  __device__ float Lse() const { return max == EmptyLse() ? EmptyLse() : max + logf(sum); }
};

__device__ __forceinline__ Total TotalOf(const float* lse, std::int64_t stride,
                                         std::int32_t num_parts) {
  Total total{EmptyLse(), 0.0F};
  for (std::int32_t part = 0; part < num_parts; ++part) {
    total.max = fmaxf(total.max, lse[part * stride]);
  }
  if (total.max == EmptyLse()) {
    // The largest beside nothing is lost if it is a NaN, which must not look like nothing.
    for (std::int32_t part = 0; part < num_parts; ++part) {
      if (isnan(lse[part * stride])) total.max = lse[part * stride];
    }
    return total;
  }
  for (std::int32_t part = 0; part < num_parts; ++part) {
    total.sum += expf(lse[part * stride] - total.max);
  }
  return total;
}

// A warp a head of a row.
template <typename T, int kPack>
__global__ void __launch_bounds__(kWarps * 32) LseMergeKernel(LseMergeParams<T> p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= std::int64_t{p.num_rows} * p.num_heads) return;
  const std::int64_t padded = index / p.num_heads * p.padded_heads + index % p.num_heads;
  const float* lse = p.lse + padded;
  const Total total = TotalOf(lse, p.lse_stride, p.num_parts);
  for (int i = lane * kPack; i < p.head_dim; i += 32 * kPack) {
    float sums[kPack] = {};
    for (std::int32_t part = 0; part < p.num_parts; ++part) {
      const float weight = total.Weight(lse[part * p.lse_stride]);
      if (weight == 0.0F) continue;
      const Pack<T, kPack> in =
          LoadPack<kPack>(p.parts + part * p.part_stride + padded * p.head_dim + i);
      for (int j = 0; j < kPack; ++j) sums[j] += weight * Widen(in.v[j]);
    }
    Pack<T, kPack> out;
    for (int j = 0; j < kPack; ++j) out.v[j] = Narrow<T>(sums[j]);
    StorePack<kPack>(p.out + index * p.head_dim + i, out);
  }
  if (p.merged_lse != nullptr && lane == 0) p.merged_lse[index] = total.Lse();
}

template <typename T, int kPack>
__global__ void __launch_bounds__(kWarps * 32) LseScaleKernel(LseScaleParams<T> p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const std::int64_t heads = std::int64_t{p.num_rows} * p.num_heads;
  if (index >= heads) return;
  const Total total = TotalOf(p.lse + index, heads, p.num_parts);
  const float weight = total.Weight(p.lse[p.part * heads + index]);
  for (int i = lane * kPack; i < p.head_dim; i += 32 * kPack) {
    T* at = p.out + index * p.head_dim + i;
    Pack<T, kPack> out = {};
    if (weight != 0.0F) {
      out = LoadPack<kPack>(at);
      for (int j = 0; j < kPack; ++j) out.v[j] = Narrow<T>(Widen(out.v[j]) * weight);
    }
    StorePack<kPack>(at, out);
  }
}

template <typename T>
struct ExchangeArgs {
  HeadExchangeParams p;
  const T* in;
  T* out;
  float padding;
};

constexpr int kThreads = 128;

// A block a row and part.
template <typename T, bool kPacks>
__global__ void __launch_bounds__(kThreads) ExchangeKernel(ExchangeArgs<T> a) {
  const std::int64_t row = blockIdx.x;
  const auto part = static_cast<std::int32_t>(blockIdx.y);
  const std::int32_t begin = a.p.part_begin[part];
  const std::int32_t count = (a.p.part_begin[part + 1] - begin) * a.p.head_dim;
  const std::int32_t padded = a.p.padded_heads * a.p.head_dim;
  const std::int64_t at_part = part * a.p.part_stride + row * padded;
  const std::int64_t at_head = (row * a.p.part_begin[a.p.num_parts] + begin) * a.p.head_dim;
  if constexpr (kPacks) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < padded; i += kThreads) {
      a.out[at_part + i] = i < count ? a.in[at_head + i] : Narrow<T>(a.padding);
    }
  } else {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
      a.out[at_head + i] = a.in[at_part + i];
    }
  }
}

template <typename T, bool kPacks>
absl::Status Exchange(const char* name, const HeadExchangeParams& p, const T* in, float padding,
                      T* out, CudaStream& stream) {
  if (p.num_rows == 0 || p.num_parts == 0) return absl::OkStatus();
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.num_parts));
  return Launch<ExchangeKernel<T, kPacks>>(name, grid, kThreads, 0, stream.handle(),
                                           ExchangeArgs<T>{p, in, out, padding});
}

unsigned BlocksOfHeads(std::int64_t heads) {
  return static_cast<unsigned>((heads + kWarps - 1) / kWarps);
}

}  // namespace

template <typename T>
absl::Status LseMerge(const LseMergeParams<T>& p, CudaStream& stream) {
  const std::int64_t heads = std::int64_t{p.num_rows} * p.num_heads;
  if (heads == 0) return absl::OkStatus();
  constexpr int kPack = kPackOf<T>;
  if (PacksFit(p.parts, p.head_dim, p.part_stride) && PacksFit(p.out, 0, 0)) {
    return Launch<LseMergeKernel<T, kPack>>("LseMerge", BlocksOfHeads(heads), kWarps * 32, 0,
                                            stream.handle(), p);
  }
  return Launch<LseMergeKernel<T, 1>>("LseMerge", BlocksOfHeads(heads), kWarps * 32, 0,
                                      stream.handle(), p);
}

template <typename T>
absl::Status LseScale(const LseScaleParams<T>& p, CudaStream& stream) {
  const std::int64_t heads = std::int64_t{p.num_rows} * p.num_heads;
  if (heads == 0) return absl::OkStatus();
  constexpr int kPack = kPackOf<T>;
  if (PacksFit(p.out, p.head_dim, 0)) {
    return Launch<LseScaleKernel<T, kPack>>("LseScale", BlocksOfHeads(heads), kWarps * 32, 0,
                                            stream.handle(), p);
  }
  return Launch<LseScaleKernel<T, 1>>("LseScale", BlocksOfHeads(heads), kWarps * 32, 0,
                                      stream.handle(), p);
}

template <typename T>
absl::Status UnpackHeads(const HeadExchangeParams& params, const T* parts, T* heads,
                         CudaStream& stream) {
  return Exchange<T, false>("UnpackHeads", params, parts, 0.0F, heads, stream);
}

template <typename T>
absl::Status PackHeads(const HeadExchangeParams& params, const T* heads, float padding, T* parts,
                       CudaStream& stream) {
  return Exchange<T, true>("PackHeads", params, heads, padding, parts, stream);
}

#define WEFT_INSTANTIATE(T)                                                                   \
  template absl::Status LseMerge<T>(const LseMergeParams<T>&, CudaStream&);                   \
  template absl::Status LseScale<T>(const LseScaleParams<T>&, CudaStream&);                   \
  template absl::Status UnpackHeads<T>(const HeadExchangeParams&, const T*, T*, CudaStream&); \
  template absl::Status PackHeads<T>(const HeadExchangeParams&, const T*, float, T*, CudaStream&)
WEFT_INSTANTIATE(float);
WEFT_INSTANTIATE(BFloat16);
WEFT_INSTANTIATE(Float16);

}  // namespace weft::kernels::cuda
