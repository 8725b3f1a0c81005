#include <string>

#include "kernels/cuda/moe.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

// A group's rank among groups, by its best or its best two experts.
__device__ __forceinline__ float ScoreOfGroup(GroupScore how, const float* ranks,
                                              std::int32_t size) {
  float best = -INFINITY;
  float second = -INFINITY;
  for (std::int32_t i = 0; i < size; ++i) {
    if (ranks[i] > best) {
      second = best;
      best = ranks[i];
    } else if (ranks[i] > second) {
      second = ranks[i];
    }
  }
  return how == GroupScore::kBest || size == 1 ? best : best + second;
}

// Takes all experts but those of the best groups out of the running.
__device__ __forceinline__ void KeepBestGroups(const RouteRowsParams& p, float* ranks,
                                               float* group_scores, int lane) {
  const std::int32_t size = p.num_experts / p.num_groups;
  for (std::int32_t group = lane; group < p.num_groups; group += 32) {
    group_scores[group] = ScoreOfGroup(p.group_score, ranks + group * size, size);
  }
  __syncwarp();
  for (std::int32_t group = lane; group < p.num_groups; group += 32) {
    const float own = group_scores[group];
    std::int32_t before = 0;
    for (std::int32_t other = 0; other < p.num_groups; ++other) {
      const float theirs = group_scores[other];
      before += theirs > own || (theirs == own && other < group);
    }
    if (before < p.top_groups) continue;
    for (std::int32_t i = 0; i < size; ++i) ranks[group * size + i] = -INFINITY;
  }
  __syncwarp();
}

// The lane has experts lane, lane + 32, ...: bit i of `taken` says that its i-th is taken. The
// first of the largest that are not; never one that is, even where values are no numbers.
__device__ __forceinline__ std::int32_t BestBut(unsigned taken, const float* ranks,
                                                std::int32_t num_experts, int lane) {
  std::int32_t best = -1;
  float rank = 0.0F;
  for (std::int32_t i = lane; i < num_experts; i += 32) {
    if ((taken >> (i / 32) & 1) != 0) continue;
    if (best >= 0 && !(ranks[i] > rank)) continue;
    best = i;
    rank = ranks[i];
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const std::int32_t other = __shfl_xor_sync(kAllLanes, best, lanes);
    const float others_rank = __shfl_xor_sync(kAllLanes, rank, lanes);
    if (other < 0) continue;
    // Lanes have to agree, also where neither is larger nor equal.
    const bool apart = !(others_rank > rank) && !(rank > others_rank);
    if (best < 0 || others_rank > rank || (apart && other < best)) {
      best = other;
      rank = others_rank;
    }
  }
  return __shfl_sync(kAllLanes, best, 0);
}

// A warp a row.
__global__ void __launch_bounds__(32) RouteRowsKernel(RouteRowsParams p) {
  WEFT_DYNAMIC_SHARED(float, scores);  // [num_experts], then ranks, then of groups
  float* ranks = scores + p.num_experts;
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.num_experts;

  float max = -INFINITY;
  for (std::int32_t e = lane; e < p.num_experts; e += 32) max = fmaxf(max, logits[e]);
  max = WarpMax(max);
  float sum = 0.0F;
  for (std::int32_t e = lane; e < p.num_experts; e += 32) {
    const bool softmax = p.score == ExpertScore::kSoftmax;
    scores[e] = softmax ? expf(logits[e] - max) : 1.0F / (1.0F + expf(-logits[e]));
    sum += scores[e];
  }
  if (p.score == ExpertScore::kSoftmax) {
    sum = WarpSum(sum);
    for (std::int32_t e = lane; e < p.num_experts; e += 32) scores[e] /= sum;
  }
  for (std::int32_t e = lane; e < p.num_experts; e += 32) {
    ranks[e] = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];
  }
  __syncwarp();
  if (p.group_score != GroupScore::kNone) KeepBestGroups(p, ranks, ranks + p.num_experts, lane);

  std::int32_t* experts = p.experts + row * p.top_k;
  float* weights = p.weights + row * p.top_k;
  unsigned taken = 0;
  float total = 0.0F;
  for (std::int32_t j = 0; j < p.top_k; ++j) {
    const std::int32_t best = BestBut(taken, ranks, p.num_experts, lane);
    if (best % 32 == lane) taken |= 1U << (best / 32);
    total += scores[best];
    if (lane == 0) experts[j] = best;
  }
  __syncwarp();
  for (std::int32_t j = lane; j < p.top_k; j += 32) {
    float weight = scores[experts[j]];
    if (p.normalize) weight /= total + 1e-20F;
    weights[j] = weight * p.scale;
  }
}

constexpr int kThreads = 256;

// A block a local expert, in the order of the routed rows: it counts what comes before its own, and
// then places them.
__global__ void __launch_bounds__(kThreads) SortByExpertKernel(SortByExpertParams p) {
  constexpr int kWarps = kThreads / 32;
  WEFT_SHARED(std::int32_t, of_warp, kWarps);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t lane = thread % 32;
  const std::int32_t warp = thread / 32;
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t count = p.num_rows * p.top_k;

  // Rows of this expert, and those of the local ones before it.
  std::int32_t before = 0;
  for (std::int32_t i = thread; i < count; i += kThreads) {
    const std::int32_t local = p.experts[i] - p.first_expert;
    before += local >= 0 && local < expert;
    if (expert == 0 && (local < 0 || local >= p.num_local)) p.place_of[i] = -1;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) before += __shfl_xor_sync(kAllLanes, before, lanes);
  if (lane == 0) of_warp[warp] = before;
  __syncthreads();
  std::int32_t place = 0;
  for (int w = 0; w < kWarps; ++w) place += of_warp[w];
  if (thread == 0) p.expert_begin[expert] = place;
  __syncthreads();

  for (std::int32_t begin = 0; begin < count; begin += kThreads) {
    const std::int32_t i = begin + thread;
    const bool own = i < count && expert < p.num_local && p.experts[i] - p.first_expert == expert;
    const unsigned votes = __ballot_sync(kAllLanes, own);
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    std::int32_t at = place + __popc(votes & ((1U << lane) - 1));
    std::int32_t total = 0;
    for (int w = 0; w < kWarps; ++w) {
      at += w < warp ? of_warp[w] : 0;
      total += of_warp[w];
    }
    if (own) {
      p.place_of[i] = at;
      p.row_of[at] = i / p.top_k;
    }
    place += total;
    __syncthreads();
  }
  if (thread == 0 && expert == p.num_local - 1) p.expert_begin[p.num_local] = place;
}

template <typename T, int kPack>
__global__ void __launch_bounds__(kThreads) CombineExpertsKernel(CombineExpertsParams<T> p) {
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kPack;
  if (i >= p.size) return;
  const std::int64_t row = blockIdx.x;
  float sums[kPack] = {};
  if (p.residual != nullptr) {
    const Pack<T, kPack> residual = LoadPack<kPack>(p.residual + row * p.size + i);
    for (int j = 0; j < kPack; ++j) sums[j] = Widen(residual.v[j]);
  }
  for (std::int64_t k = row * p.top_k; k < (row + 1) * p.top_k; ++k) {
    const std::int32_t place = p.place_of[k];
    if (place < 0) continue;
    const Pack<T, kPack> in = LoadPack<kPack>(p.in + std::int64_t{place} * p.size + i);
    for (int j = 0; j < kPack; ++j) sums[j] += p.weights[k] * Widen(in.v[j]);
  }
  Pack<T, kPack> out;
  for (int j = 0; j < kPack; ++j) out.v[j] = Narrow<T>(sums[j]);
  StorePack<kPack>(p.out + row * p.size + i, out);
}

dim3 GridOfRows(std::int32_t num_rows, std::int32_t size, int pack) {
  const int per_block = kThreads * pack;
  return dim3(static_cast<unsigned>(num_rows),
              static_cast<unsigned>((size + per_block - 1) / per_block));
}

}  // namespace

absl::Status RouteRows(const RouteRowsParams& p, CudaStream& stream) {
  if (p.num_experts < 1 || p.num_experts > kMaxDeviceExperts || p.num_groups > kMaxExpertGroups) {
    return absl::InvalidArgumentError(
        "RouteRows: " + std::to_string(p.num_experts) + " experts in " +
        std::to_string(p.num_groups) + " groups; allowed are 1 to " +
        std::to_string(kMaxDeviceExperts) + " in up to " + std::to_string(kMaxExpertGroups));
  }
  if (p.num_rows == 0) return absl::OkStatus();
  const std::size_t shared =
      sizeof(float) * (2 * static_cast<std::size_t>(p.num_experts) + kMaxExpertGroups);
  return Launch<RouteRowsKernel>("RouteRows", static_cast<unsigned>(p.num_rows), 32, shared,
                                 stream.handle(), p);
}

absl::Status SortByExpert(const SortByExpertParams& p, CudaStream& stream) {
  // At least one block, which says of every row that it is nowhere.
  return Launch<SortByExpertKernel>("SortByExpert",
                                    static_cast<unsigned>(p.num_local > 0 ? p.num_local : 1),
                                    kThreads, 0, stream.handle(), p);
}

template <typename T>
absl::Status CombineExperts(const CombineExpertsParams<T>& p, CudaStream& stream) {
  if (p.num_rows == 0 || p.size == 0) return absl::OkStatus();
  constexpr int kPack = kPackOf<T>;
  if (PacksFit(p.in, p.size, 0) && PacksFit(p.out, 0, 0) && PacksFit(p.residual, 0, 0)) {
    return Launch<CombineExpertsKernel<T, kPack>>(
        "CombineExperts", GridOfRows(p.num_rows, p.size, kPack), kThreads, 0, stream.handle(), p);
  }
  return Launch<CombineExpertsKernel<T, 1>>("CombineExperts", GridOfRows(p.num_rows, p.size, 1),
                                            kThreads, 0, stream.handle(), p);
}

template absl::Status CombineExperts<float>(const CombineExpertsParams<float>&, CudaStream&);
template absl::Status CombineExperts<BFloat16>(const CombineExpertsParams<BFloat16>&, CudaStream&);
template absl::Status CombineExperts<Float16>(const CombineExpertsParams<Float16>&, CudaStream&);

}  // namespace weft::kernels::cuda
