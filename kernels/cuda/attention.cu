#include <algorithm>
#include <string>
#include <type_traits>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_heads.h"
#include "kernels/cuda/attention_tensor_core.h"
#include "kernels/cuda/values.h"

// The generic kernel, on CUDA cores: any head_dim, block and dtype, exact in fp32. A block takes
// one row and up to kHeads of the query heads of one KV head; a thread has a key in the scores and
// a dim or several in the values.

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;
// So many, and nvcc gives each thread what it needs, rather than spill to fit in more.
[[maybe_unused]] constexpr int kBlocksOfSm = 4;
constexpr int kTileKeys = kThreads;
constexpr int kPartKeys = 512;
static_assert(kPartKeys % kTileKeys == 0);
// With more blocks than this the parts of a row are left to one block, and need no workspace.
constexpr std::int64_t kMaxSplitBlocks = 4096;
constexpr int kMaxHeadsOfTile = 8;

// Sums over some keys, relative to the largest score: what merges.
struct Softmax {
  float max;
  float sum;
};

struct Factors {
  float old_part;
  float new_part;
};

// Adds `part` to `all`; values are to be scaled likewise. Explicit roundings: both who merges parts
// in registers and who does from memory give the same bits.
__device__ __forceinline__ Factors MergePart(const Softmax& part, Softmax& all) {
  if (part.max == -INFINITY) return {1.0F, 0.0F};
  const float max = fmaxf(all.max, part.max);
  const Factors factors = {expf(all.max - max), expf(part.max - max)};
  all.sum = __fadd_rn(__fmul_rn(all.sum, factors.old_part), __fmul_rn(part.sum, factors.new_part));
  all.max = max;
  return factors;
}
__device__ __forceinline__ float MergeValue(float all, float part, const Factors& factors) {
  return __fadd_rn(__fmul_rn(all, factors.old_part), __fmul_rn(part, factors.new_part));
}

template <typename T>
struct Args {
  GqaAttentionParams<T> p;
  std::int32_t head_tiles;  // of a KV head
  std::int32_t num_parts;   // 0: a block computes all parts of its row
  float* part_values;       // [num_rows, num_q_heads, num_parts, value_dim]
  Softmax* part_softmax;    // [num_rows, num_q_heads, num_parts]
};

// The block's shared memory, in floats; then kTileKeys 64-bit offsets.
template <int kHeads>
struct Shared {
  float* q;              // [kHeads][head_dim]
  float* weights;        // [kHeads][kTileKeys] scores, then weights
  Softmax* softmax;      // [kHeads] of the part so far
  float* rescale;        // [kHeads] of the part's values at this tile
  std::int64_t* offset;  // [kTileKeys] where a key's K is, in values; V likewise

  __device__ explicit Shared(float* memory) {
    offset = reinterpret_cast<std::int64_t*>(memory);
    weights = memory + 2 * kTileKeys;
    softmax = reinterpret_cast<Softmax*>(weights + kHeads * kTileKeys);
    rescale = reinterpret_cast<float*>(softmax + kHeads);
    q = rescale + kHeads;
  }
};
template <int kHeads>
std::size_t SharedBytes(std::int32_t head_dim) {
  return sizeof(float) *
         (2 * kTileKeys + kHeads * (kTileKeys + 3 + static_cast<std::size_t>(head_dim)));
}

// shared.weights[h][key] = scaled score of the thread's key; -inf outside of [0, num_keys).
template <typename Kv, int kHeads>
__device__ __forceinline__ void Scores(const kernels::GqaAttentionParams& g,
                                       const Shared<kHeads>& shared, std::int32_t num_keys) {
  constexpr int kPack = kPackOf<Kv>;
  const auto key = static_cast<std::int32_t>(threadIdx.x);
  float scores[kHeads] = {};
  if (key < num_keys) {
    const Kv* k = static_cast<const Kv*>(g.k_blocks) + shared.offset[key];
    for (std::int32_t d = 0; d < g.head_dim; d += kPack) {
      const Pack<Kv, kPack> pack = LoadPack<kPack>(k + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = Widen(pack.v[j]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) scores[h] += value * shared.q[h * g.head_dim + d + j];
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    shared.weights[h * kTileKeys + key] = key < num_keys ? scores[h] * g.scale : -INFINITY;
  }
}

// One tile's step of the online softmax, a warp a head.
template <int kHeads>
__device__ __forceinline__ void SoftmaxStep(const Shared<kHeads>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int h = static_cast<int>(threadIdx.x) / 32; h < kHeads; h += kThreads / 32) {
    float* weights = shared.weights + h * kTileKeys;
    float max = -INFINITY;
    for (int key = lane; key < kTileKeys; key += 32) max = fmaxf(max, weights[key]);
    const Softmax old = shared.softmax[h];
    max = fmaxf(WarpMax(max), old.max);
    const float shift = max == -INFINITY ? 0.0F : max;
    float sum = 0.0F;
    for (int key = lane; key < kTileKeys; key += 32) {
      weights[key] = expf(weights[key] - shift);
      sum += weights[key];
    }
    sum = WarpSum(sum);
    __syncwarp();  // all lanes have read `old`
    if (lane == 0) {
      const float keep = expf(old.max - shift);
      shared.rescale[h] = keep;
      shared.softmax[h] = {max, old.sum * keep + sum};
    }
  }
}

// The part [begin, end) of the row's entries; values[h][i] are those of dim threadIdx.x + i *
// kThreads. Returns with shared.softmax as it is to be merged, and all threads past its writes.
template <typename Kv, int kHeads, int kDims>
__device__ __forceinline__ void AttendPart(const kernels::GqaAttentionParams& g,
                                           const Shared<kHeads>& shared, std::int32_t kv_head,
                                           const std::int32_t* blocks, std::int32_t begin,
                                           std::int32_t end, float (&values)[kHeads][kDims]) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto* v_blocks = static_cast<const Kv*>(g.v_blocks != nullptr ? g.v_blocks : g.k_blocks);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kDims; ++i) values[h][i] = 0.0F;
  }
  if (thread < kHeads) shared.softmax[thread] = {-INFINITY, 0.0F};
  for (std::int32_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
    const std::int32_t first = tile > begin ? tile : begin;
    const std::int32_t last = tile + kTileKeys < end ? tile + kTileKeys : end;
    const std::int32_t num_keys = last - first;
    __syncthreads();  // the tile before has been used
    if (thread < num_keys) {
      const std::int32_t entry = first + thread;
      shared.offset[thread] =
          KvIndex(blocks[entry / g.block_tokens_per_rank], kv_head, entry % g.block_tokens_per_rank,
                  g.num_kv_heads, g.block_tokens_per_rank, g.head_dim);
    }
    Scores<Kv, kHeads>(g, shared, num_keys);  // its own thread's offset only
    __syncthreads();
    SoftmaxStep<kHeads>(shared);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) values[h][i] *= shared.rescale[h];
    }
    for (std::int32_t key = 0; key < num_keys; ++key) {
      const Kv* v = v_blocks + shared.offset[key];
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const std::int32_t dim = thread + i * kThreads;
        if (dim >= g.value_dim) continue;
        const float value = Widen(v[dim]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          values[h][i] += shared.weights[h * kTileKeys + key] * value;
      }
    }
  }
  __syncthreads();
}

template <typename T, typename Kv, int kHeads, int kDims>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) AttentionKernel(Args<T> a) {
  WEFT_DYNAMIC_SHARED(float, memory);
  const kernels::GqaAttentionParams& g = a.p.geometry;
  const Shared<kHeads> shared(memory);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t row = blockIdx.x;
  const HeadTile tile = HeadTileOf(g, kHeads, a.head_tiles, static_cast<std::int32_t>(blockIdx.y));
  const std::int32_t begin = g.first_visible[row];
  const std::int32_t end = g.visible_len[row];
  const bool split = a.num_parts > 0;
  std::int32_t first_part = begin / kPartKeys;
  std::int32_t end_part = end > begin ? (end + kPartKeys - 1) / kPartKeys : first_part;
  if (split) {
    const auto part = static_cast<std::int32_t>(blockIdx.z);
    if (part < first_part || part >= end_part) return;  // the whole block
    first_part = part;
    end_part = part + 1;
  }
  if (tile.count == 0) return;  // likewise

  for (std::int32_t i = thread; i < kHeads * g.head_dim; i += kThreads) {
    const std::int32_t head = i / g.head_dim;
    const std::int64_t at = (row * g.num_q_heads + tile.first + head) * g.head_dim + i % g.head_dim;
    shared.q[i] = head < tile.count ? Widen(a.p.q[at]) : 0.0F;
  }
  const std::int32_t* blocks = g.block_table + std::int64_t{g.row_slot[row]} * g.max_blocks_per_seq;
  Softmax all[kHeads];
  float all_values[kHeads][kDims] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) all[h] = {-INFINITY, 0.0F};
  for (std::int32_t part = first_part; part < end_part; ++part) {
    const std::int32_t from = part * kPartKeys > begin ? part * kPartKeys : begin;
    const std::int32_t to = (part + 1) * kPartKeys < end ? (part + 1) * kPartKeys : end;
    float values[kHeads][kDims];
    AttendPart<Kv, kHeads, kDims>(g, shared, tile.kv_head, blocks, from, to, values);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const Softmax softmax = shared.softmax[h];
      if (split) {
        if (h >= tile.count) continue;
        const std::int64_t at = (row * g.num_q_heads + tile.first + h) * a.num_parts + part;
        if (thread == 0) a.part_softmax[at] = softmax;
#pragma unroll
        for (int i = 0; i < kDims; ++i) {
          const std::int32_t dim = thread + i * kThreads;
          if (dim < g.value_dim) a.part_values[at * g.value_dim + dim] = values[h][i];
        }
      } else {
        const Factors factors = MergePart(softmax, all[h]);
#pragma unroll
        for (int i = 0; i < kDims; ++i)
          all_values[h][i] = MergeValue(all_values[h][i], values[h][i], factors);
      }
    }
    __syncthreads();  // shared.softmax has been read
  }
  if (split) return;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= tile.count) continue;
    const std::int64_t at = row * g.num_q_heads + tile.first + h;
    const bool empty = all[h].max == -INFINITY;
    if (thread == 0) g.lse[at] = empty ? -INFINITY : all[h].max + logf(all[h].sum);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const std::int32_t dim = thread + i * kThreads;
      if (dim >= g.value_dim) continue;
      a.p.out[at * g.value_dim + dim] = Narrow<T>(empty ? 0.0F : all_values[h][i] / all[h].sum);
    }
  }
}

// A block a row and query head.
template <typename T>
__global__ void __launch_bounds__(kThreads) MergePartsKernel(Args<T> a) {
  const kernels::GqaAttentionParams& g = a.p.geometry;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t row = blockIdx.x;
  const std::int64_t at = row * g.num_q_heads + blockIdx.y;
  const std::int32_t begin = g.first_visible[row];
  const std::int32_t end = g.visible_len[row];
  const std::int32_t first_part = begin / kPartKeys;
  const std::int32_t end_part = end > begin ? (end + kPartKeys - 1) / kPartKeys : first_part;
  for (std::int32_t dim = thread; dim < g.value_dim; dim += kThreads) {
    Softmax all = {-INFINITY, 0.0F};
    float value = 0.0F;
    for (std::int32_t part = first_part; part < end_part; ++part) {
      const std::int64_t from = at * a.num_parts + part;
      const Factors factors = MergePart(a.part_softmax[from], all);
      value = MergeValue(value, a.part_values[from * g.value_dim + dim], factors);
    }
    const bool empty = all.max == -INFINITY;
    a.p.out[at * g.value_dim + dim] = Narrow<T>(empty ? 0.0F : value / all.sum);
    if (dim == 0) g.lse[at] = empty ? -INFINITY : all.max + logf(all.sum);
  }
}

// How many tiles of heads, and over how many parts the launch is split.
struct LaunchPlan {
  int heads;  // of a tile
  int dims;   // of a thread
  std::int32_t head_tiles;
  std::int32_t num_parts;  // 0: not split
};

LaunchPlan PlanOf(std::int64_t num_rows, std::int32_t num_q_heads, std::int32_t num_kv_heads,
                  std::int32_t q_per_kv, std::int32_t value_dim, std::int32_t max_visible_len) {
  LaunchPlan plan;
  plan.dims = value_dim <= kThreads       ? 1
              : value_dim <= 2 * kThreads ? 2
              : value_dim <= 4 * kThreads ? 4
                                          : 8;
  plan.heads = plan.dims <= 2 ? kMaxHeadsOfTile : 4;
  plan.head_tiles = (std::min(q_per_kv, num_q_heads) + plan.heads - 1) / plan.heads;
  const std::int32_t parts = (max_visible_len + kPartKeys - 1) / kPartKeys;
  const std::int64_t blocks = num_rows * num_kv_heads * plan.head_tiles * parts;
  plan.num_parts = parts > 1 && blocks <= kMaxSplitBlocks ? parts : 0;
  return plan;
}

absl::Status CheckDims(const kernels::GqaAttentionParams& g) {
  const bool latent = g.v_blocks == nullptr;
  const std::int32_t most = latent ? kMaxLatentDim : kMaxHeadDim;
  if (g.head_dim < 8 || g.head_dim > most || g.head_dim % 8 != 0) {
    return absl::InvalidArgumentError("head_dim is " + std::to_string(g.head_dim) +
                                      "; allowed are multiples of 8 up to " + std::to_string(most));
  }
  const std::int32_t least = latent ? 1 : g.head_dim;
  if (g.value_dim < least || g.value_dim > g.head_dim) {
    return absl::InvalidArgumentError("value_dim is " + std::to_string(g.value_dim) +
                                      "; allowed are " + std::to_string(least) + " to " +
                                      std::to_string(g.head_dim));
  }
  return absl::OkStatus();
}

template <typename T, typename Kv, int kHeads, int kDims>
absl::Status LaunchAttention(const Args<T>& args, CudaStream& stream) {
  const kernels::GqaAttentionParams& g = args.p.geometry;
  const dim3 grid(static_cast<unsigned>(g.num_rows),
                  static_cast<unsigned>(g.num_kv_heads * args.head_tiles),
                  static_cast<unsigned>(std::max(1, args.num_parts)));
  absl::Status status = Launch<AttentionKernel<T, Kv, kHeads, kDims>>(
      "GqaAttention", grid, kThreads, SharedBytes<kHeads>(g.head_dim), stream.handle(), args);
  if (!status.ok() || args.num_parts == 0) return status;
  const dim3 merge_grid(static_cast<unsigned>(g.num_rows), static_cast<unsigned>(g.num_q_heads));
  return Launch<MergePartsKernel<T>>("GqaAttention merge", merge_grid, kThreads, 0, stream.handle(),
                                     args);
}

bool IsGqaOfTensorCores(const kernels::GqaAttentionParams& g) {
  return g.v_blocks != nullptr && (g.head_dim == 64 || g.head_dim == 128);
}
bool IsMlaOfTensorCores(const kernels::GqaAttentionParams& g) {
  return g.v_blocks == nullptr && g.head_dim == 576 && g.value_dim == 512;
}

// All that decides which kernel attends.
template <typename T, typename Kv>
absl::Status LaunchFor(const GqaAttentionParams<T>& p, void* workspace, CudaStream& stream) {
  const kernels::GqaAttentionParams& g = p.geometry;
  if constexpr (!std::is_same_v<Kv, float>) {
    const TensorCoreAttention attention = {.geometry = g,
                                           .q = p.q,
                                           .out = p.out,
                                           .fp32 = std::is_same_v<T, float>,
                                           .max_visible_len = p.max_visible_len};
    if (IsGqaOfTensorCores(g)) return GqaOnTensorCores(attention, workspace, stream);
    if (IsMlaOfTensorCores(g)) return MlaOnTensorCores(attention, workspace, stream);
  }
  const LaunchPlan plan =
      PlanOf(g.num_rows, g.num_q_heads, g.num_kv_heads, g.q_per_kv, g.value_dim, p.max_visible_len);
  auto* softmax = static_cast<Softmax*>(workspace);
  const std::int64_t records = std::int64_t{g.num_rows} * g.num_q_heads * plan.num_parts;
  const Args<T> args = {.p = p,
                        .head_tiles = plan.head_tiles,
                        .num_parts = plan.num_parts,
                        .part_values = reinterpret_cast<float*>(softmax + records),
                        .part_softmax = softmax};
  if (plan.dims == 1) return LaunchAttention<T, Kv, 8, 1>(args, stream);
  if (plan.dims == 2) return LaunchAttention<T, Kv, 8, 2>(args, stream);
  if (plan.dims == 4) return LaunchAttention<T, Kv, 4, 4>(args, stream);
  return LaunchAttention<T, Kv, 4, 8>(args, stream);
}

absl::Status NoSuchKv(const char* type, DType kv_dtype) {
  return absl::InvalidArgumentError("activations in " + std::string(type) + " attend to KV in " +
                                    type + "; kv_dtype is " + std::string(DTypeName(kv_dtype)));
}

}  // namespace

std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                        std::int32_t value_dim, std::int32_t max_visible_len) {
  // More are not split.
  const std::int64_t parts = (max_visible_len + kPartKeys - 1) / kPartKeys;
  const std::int64_t heads = std::min<std::int64_t>(std::int64_t{max_rows} * num_q_heads * parts,
                                                    kMaxSplitBlocks * kMaxHeadsOfTile);
  const std::int64_t generic =
      heads * static_cast<std::int64_t>(sizeof(Softmax) + sizeof(float) * value_dim);
  if (value_dim == 64 || value_dim == 128)
    return std::max(generic, GqaTensorCoreWorkspaceBytes(value_dim));
  return value_dim == 512 ? std::max(generic, MlaTensorCoreWorkspaceBytes()) : generic;
}

template <>
absl::Status GqaAttention<float>(const GqaAttentionParams<float>& p, void* workspace,
                                 CudaStream& stream) {
  if (absl::Status status = CheckDims(p.geometry); !status.ok()) return status;
  if (p.geometry.num_rows == 0) return absl::OkStatus();
  switch (p.geometry.kv_dtype) {
    case DType::kFloat32:
      return LaunchFor<float, float>(p, workspace, stream);
    case DType::kBFloat16:
      return LaunchFor<float, BFloat16>(p, workspace, stream);
    case DType::kFloat16:
      return LaunchFor<float, Float16>(p, workspace, stream);
  }
  return absl::InternalError("GqaAttention: unreachable");
}

template <>
absl::Status GqaAttention<BFloat16>(const GqaAttentionParams<BFloat16>& p, void* workspace,
                                    CudaStream& stream) {
  if (absl::Status status = CheckDims(p.geometry); !status.ok()) return status;
  if (p.geometry.kv_dtype != DType::kBFloat16) return NoSuchKv("bfloat16", p.geometry.kv_dtype);
  if (p.geometry.num_rows == 0) return absl::OkStatus();
  return LaunchFor<BFloat16, BFloat16>(p, workspace, stream);
}

template <>
absl::Status GqaAttention<Float16>(const GqaAttentionParams<Float16>& p, void* workspace,
                                   CudaStream& stream) {
  if (absl::Status status = CheckDims(p.geometry); !status.ok()) return status;
  if (p.geometry.kv_dtype != DType::kFloat16) return NoSuchKv("float16", p.geometry.kv_dtype);
  if (p.geometry.num_rows == 0) return absl::OkStatus();
  return LaunchFor<Float16, Float16>(p, workspace, stream);
}

}  // namespace weft::kernels::cuda
