#include <string>

#include "kernels/cuda/kv_append.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kWarps = 4;

// A warp a row and head.
template <typename T, typename Kv>
__global__ void __launch_bounds__(kWarps * 32) KvAppendKernel(KvAppendParams<T> p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= std::int64_t{p.num_rows} * p.num_kv_heads) return;  // the whole warp, as below
  const std::int64_t row = index / p.num_kv_heads;
  const auto head = static_cast<std::int32_t>(index % p.num_kv_heads);
  const std::int64_t slot = p.slots[row];
  if (slot < 0) return;
  const std::int64_t to = KvIndex(slot / p.block_tokens_per_rank, head,
                                  static_cast<std::int32_t>(slot % p.block_tokens_per_rank),
                                  p.num_kv_heads, p.block_tokens_per_rank, p.head_dim);
  const std::int64_t from = row * p.kv_stride + std::int64_t{head} * p.head_dim;

  if (p.v != nullptr) {
    Kv* v = static_cast<Kv*>(p.v_blocks) + to;
    for (int i = lane; i < p.head_dim; i += 32) v[i] = Narrow<Kv>(Widen(p.v[from + i]));
  }

  const T* in = p.k + from;
  Kv* out = static_cast<Kv*>(p.k_blocks) + to;
  float scale = 1.0F;
  if (p.norm_weight != nullptr) {
    float squares = 0.0F;
    for (int i = lane; i < p.norm_dim; i += 32) squares += Widen(in[i]) * Widen(in[i]);
    scale = 1.0F / sqrtf(WarpSum(squares) / static_cast<float>(p.norm_dim) + p.eps);
  }
  const auto normed = [&](int i) {
    const float x = Widen(in[i]);
    return p.norm_weight != nullptr && i < p.norm_dim ? x * scale * p.norm_weight[i] : x;
  };
  const int half = p.cos == nullptr ? 0 : p.rope_dim / 2;
  const int rope_end = p.rope_begin + 2 * half;
  for (int i = lane; i < p.head_dim; i += 32) {
    if (i < p.rope_begin || i >= rope_end) out[i] = Narrow<Kv>(normed(i));
  }
  for (int i = lane; i < half; i += 32) {
    const float a = normed(p.rope_begin + i);
    const float b = normed(p.rope_begin + half + i);
    const float cos = p.cos[row * half + i];
    const float sin = p.sin[row * half + i];
    out[p.rope_begin + i] = Narrow<Kv>(a * cos - b * sin);
    out[p.rope_begin + half + i] = Narrow<Kv>(b * cos + a * sin);
  }
}

}  // namespace

template <typename T>
absl::Status KvAppend(const KvAppendParams<T>& p, CudaStream& stream) {
  if (p.norm_dim > p.head_dim || p.rope_dim % 2 != 0 || p.rope_begin + p.rope_dim > p.head_dim) {
    return absl::InvalidArgumentError(
        "KvAppend: norm_dim is " + std::to_string(p.norm_dim) + ", rope_begin and rope_dim " +
        std::to_string(p.rope_begin) + " and " + std::to_string(p.rope_dim) +
        "; they have to be within head_dim, " + std::to_string(p.head_dim) + ", and rope_dim even");
  }
  const std::int64_t heads = std::int64_t{p.num_rows} * p.num_kv_heads;
  if (heads == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>((heads + kWarps - 1) / kWarps);
  switch (p.kv_dtype) {
    case DType::kFloat32:
      return Launch<KvAppendKernel<T, float>>("KvAppend", blocks, kWarps * 32, 0, stream.handle(),
                                              p);
    case DType::kBFloat16:
      return Launch<KvAppendKernel<T, BFloat16>>("KvAppend", blocks, kWarps * 32, 0,
                                                 stream.handle(), p);
    case DType::kFloat16:
      return Launch<KvAppendKernel<T, Float16>>("KvAppend", blocks, kWarps * 32, 0, stream.handle(),
                                                p);
  }
  return absl::InternalError("KvAppend: unreachable");
}

template absl::Status KvAppend<float>(const KvAppendParams<float>&, CudaStream&);
template absl::Status KvAppend<BFloat16>(const KvAppendParams<BFloat16>&, CudaStream&);
template absl::Status KvAppend<Float16>(const KvAppendParams<Float16>&, CudaStream&);

}  // namespace weft::kernels::cuda
