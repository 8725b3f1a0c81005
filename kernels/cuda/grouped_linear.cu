#include <algorithm>
#include <type_traits>

#include "kernels/cuda/grouped_linear.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// Rows [begin, begin + count) of `expert`; none where a block has nothing to do.
struct RowTile {
  std::int32_t expert;
  std::int32_t begin;
  std::int32_t count;
};

// Number `wanted` of the tiles of up to kRows rows, expert by expert. All threads may read *found
// after it.
template <int kRows, typename W>
__device__ __forceinline__ void FindRowTile(const GroupedLinearParams<W>& p, std::int32_t wanted,
                                            std::int32_t* scratch, RowTile* found) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread == 0) found->count = 0;
  std::int32_t begun = 0;
  for (std::int32_t first = 0; first < p.num_experts && begun <= wanted; first += kThreads) {
    const std::int32_t expert = first + thread;
    std::int32_t begin = 0;
    std::int32_t rows = 0;
    if (expert < p.num_experts) {
      begin = p.expert_begin != nullptr ? p.expert_begin[expert] : 0;
      rows = p.expert_begin != nullptr ? p.expert_begin[expert + 1] - begin : p.max_rows;
    }
    const std::int32_t tiles = (rows + kRows - 1) / kRows;
    std::int32_t total = 0;
    const std::int32_t index = wanted - begun - BlockPrefix<kThreads>(tiles, scratch, total);
    if (index >= 0 && index < tiles) {
      const std::int32_t rest = rows - index * kRows;
      *found = {expert, begin + index * kRows, rest < kRows ? rest : kRows};
    }
    begun += total;
  }
  __syncthreads();
}

template <typename W>
__device__ __forceinline__ const float* RowOfX(const GroupedLinearParams<W>& p, std::int32_t expert,
                                               std::int32_t i) {
  const std::int64_t row = p.row_of != nullptr ? p.row_of[i] : i;
  return p.x + row * p.x_stride + expert * p.x_expert_stride;
}
template <typename W>
__device__ __forceinline__ float* RowOfY(const GroupedLinearParams<W>& p, std::int32_t expert,
                                         std::int32_t i) {
  return p.y + i * p.y_stride + expert * p.y_expert_stride;
}

// On tensor cores: kRows rows and kOuts outputs a block, kDims of in_features at a time. Weights
// come by cp.async, kStages - 1 steps ahead; x by way of registers, where it is rounded.
template <typename Weight, int kRowsOf>
struct Tiles {
  using W = Weight;
  static constexpr int kRows = kRowsOf;
  static constexpr int kOuts = 128;
  static constexpr int kDims = 64;
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = 2 * kDims;
  static constexpr int kWarpsM = kRows == 16 ? 1 : 2;
  static constexpr int kWarpRowTiles = kRows / 16 / kWarpsM;
  static constexpr int kWarpOuts = kOuts * kWarpsM / kWarps;
  static constexpr int kChunks = kDims / 8;                    // of 8 values, in a row
  static constexpr int kXChunks = kRows * kChunks / kThreads;  // of a thread
  static constexpr std::size_t kSharedBytes =
      sizeof(W) * kDims * (std::size_t{kStages} * kOuts + 2 * kRows);
};

template <typename S>
struct Block {
  using W = typename S::W;
  W* weights;  // [kStages][kOuts] rows, swizzled
  W* x;        // [2][kRows] rows, swizzled
  RowTile tile;
  const W* weight;                 // of the expert
  const float* rows[S::kXChunks];  // of x, that the thread reads; null past the last
};

template <typename S>
__device__ __forceinline__ void FetchWeights(const GroupedLinearParams<typename S::W>& p,
                                             const Block<S>& block, std::int32_t step) {
  const auto first_out = static_cast<std::int32_t>(blockIdx.y) * S::kOuts;
  auto* to = block.weights + step % S::kStages * S::kOuts * S::kDims;
  for (int i = static_cast<int>(threadIdx.x); i < S::kOuts * S::kChunks; i += kThreads) {
    const int row = i / S::kChunks;
    const int chunk = i % S::kChunks;
    const std::int32_t out = first_out + row;
    const std::int32_t dim = step * S::kDims + chunk * 8;
    const bool valid = out < p.out_features && dim < p.in_features;
    const auto* from =
        valid ? block.weight + std::int64_t{out} * p.in_features + dim : block.weight;
    CpAsync16(to + SwizzledChunk<S::kRowBytes>(row, chunk) * 8, from, valid);
  }
}

template <typename S>
struct XChunks {
  Pack<float, 4> halves[S::kXChunks][2];
};

template <typename S>
__device__ __forceinline__ void LoadX(std::int32_t in_features, const Block<S>& block,
                                      std::int32_t step, XChunks<S>& x) {
  const std::int32_t dim = step * S::kDims + static_cast<int>(threadIdx.x) % S::kChunks * 8;
#pragma unroll
  for (int j = 0; j < S::kXChunks; ++j) {
    x.halves[j][0] = x.halves[j][1] = {};
    if (block.rows[j] == nullptr || dim >= in_features) continue;
    x.halves[j][0] = LoadPack<4>(block.rows[j] + dim);
    x.halves[j][1] = LoadPack<4>(block.rows[j] + dim + 4);
  }
}

template <typename S>
__device__ __forceinline__ void StoreX(const Block<S>& block, std::int32_t step,
                                       const XChunks<S>& x) {
  using W = typename S::W;
#pragma unroll
  for (int j = 0; j < S::kXChunks; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    Pack<W, 8> rounded;
#pragma unroll
    for (int k = 0; k < 8; ++k) rounded.v[k] = Narrow<W>(x.halves[j][k / 4].v[k % 4]);
    const int at = SwizzledChunk<S::kRowBytes>(i / S::kChunks, i % S::kChunks) * 8;
    *reinterpret_cast<Pack<W, 8>*>(block.x + step % 2 * S::kRows * S::kDims + at) = rounded;
  }
}

template <typename S>
struct Sums {
  Accumulator4 c[S::kWarpRowTiles][S::kWarpOuts / 8];
};

template <typename S>
__device__ __forceinline__ void Multiply(const Block<S>& block, std::int32_t step,
                                         int first_row_tile, int first_out, Sums<S>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* weights = block.weights + step % S::kStages * S::kOuts * S::kDims;
  const auto* x = block.x + step % 2 * S::kRows * S::kDims;
#pragma unroll
  for (int chunk = 0; chunk < S::kChunks; chunk += 2) {
    Fragment4 rows[S::kWarpRowTiles] = {};
#pragma unroll
    for (int m = 0; m < S::kWarpRowTiles; ++m) {
      if ((first_row_tile + m) * 16 >= block.tile.count) continue;
      const int row = (first_row_tile + m) * 16 + lane % 16;
      rows[m] = LdMatrixX4<false>(x + SwizzledChunk<S::kRowBytes>(row, chunk + lane / 16) * 8);
    }
#pragma unroll
    for (int n = 0; n < S::kWarpOuts / 16; ++n) {
      const int out = first_out + n * 16 + lane / 16 * 8 + lane % 8;
      const Fragment4 f =
          LdMatrixX4<false>(weights + SwizzledChunk<S::kRowBytes>(out, chunk + lane / 8 % 2) * 8);
#pragma unroll
      for (int m = 0; m < S::kWarpRowTiles; ++m) {
        if ((first_row_tile + m) * 16 >= block.tile.count) continue;
        MmaM16N8K16<typename S::W>(rows[m], {{f.r[0], f.r[1]}}, sums.c[m][2 * n]);
        MmaM16N8K16<typename S::W>(rows[m], {{f.r[2], f.r[3]}}, sums.c[m][2 * n + 1]);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void StoreY(const GroupedLinearParams<typename S::W>& p,
                                       const RowTile& tile, int first_row_tile, int first_out,
                                       const Sums<S>& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < S::kWarpRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = (first_row_tile + m) * 16 + half * 8 + lane / 4;
      if (row >= tile.count) continue;
      float* y = RowOfY(p, tile.expert, tile.begin + row);
#pragma unroll
      for (int n = 0; n < S::kWarpOuts / 8; ++n) {
        const std::int32_t out =
            static_cast<std::int32_t>(blockIdx.y) * S::kOuts + first_out + n * 8 + lane % 4 * 2;
        const Accumulator4& c = sums.c[m][n];
        if (out < p.out_features)
          StorePack<2>(y + out, Pack<float, 2>{{c.c[half * 2], c.c[half * 2 + 1]}});
      }
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    TensorCoreGroupedKernel(GroupedLinearParams<typename S::W> p) {
  WEFT_DYNAMIC_SHARED(unsigned char, memory);
  WEFT_SHARED(RowTile, found, 1);
  WEFT_SHARED(std::int32_t, scratch, kWarps);
  FindRowTile<S::kRows>(p, static_cast<std::int32_t>(blockIdx.x), scratch, found);
  Block<S> block;
  block.tile = *found;
  if (block.tile.count == 0) return;  // the whole block
  block.weights = reinterpret_cast<typename S::W*>(memory);
  block.x = block.weights + S::kStages * S::kOuts * S::kDims;
  block.weight = p.weights[block.tile.expert];
#pragma unroll
  for (int j = 0; j < S::kXChunks; ++j) {
    const int row = (static_cast<int>(threadIdx.x) + j * kThreads) / S::kChunks;
    block.rows[j] = nullptr;
    if (row >= block.tile.count) continue;
    const std::int32_t i = block.tile.begin + row;
    block.rows[j] = RowOfX(p, block.tile.expert, i);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_row_tile = warp % S::kWarpsM * S::kWarpRowTiles;
  const int first_out = warp / S::kWarpsM * S::kWarpOuts;
  const std::int32_t steps = (p.in_features + S::kDims - 1) / S::kDims;

  for (int step = 0; step < S::kStages - 1; ++step) {
    if (step < steps) FetchWeights<S>(p, block, step);
    CpAsyncCommit();
  }
  XChunks<S> x;
  LoadX<S>(p.in_features, block, 0, x);
  StoreX<S>(block, 0, x);
  Sums<S> sums = {};
  for (std::int32_t step = 0; step < steps; ++step) {
    CpAsyncWait<S::kStages - 2>();
    __syncthreads();  // this step's are there, and those of the one before have been used
    const std::int32_t ahead = step + S::kStages - 1;
    if (ahead < steps) FetchWeights<S>(p, block, ahead);
    CpAsyncCommit();  // also an empty group, so that each step has one
    if (step + 1 < steps) LoadX<S>(p.in_features, block, step + 1, x);
    Multiply<S>(block, step, first_row_tile, first_out, sums);
    if (step + 1 < steps) StoreX<S>(block, step + 1, x);
  }
  StoreY<S>(p, block.tile, first_row_tile, first_out, sums);
}

// On CUDA cores: a warp an output of up to kCoreRows rows, its lanes over in_features.
constexpr int kCoreRows = 8;
constexpr int kCoreOuts = 32;

template <typename W>
__global__ void __launch_bounds__(kThreads) GroupedKernel(GroupedLinearParams<W> p) {
  WEFT_SHARED(RowTile, found, 1);
  WEFT_SHARED(std::int32_t, scratch, kWarps);
  FindRowTile<kCoreRows>(p, static_cast<std::int32_t>(blockIdx.x), scratch, found);
  const RowTile tile = *found;
  if (tile.count == 0) return;  // the whole block
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* rows[kCoreRows];
#pragma unroll
  for (int r = 0; r < kCoreRows; ++r) {
    const std::int32_t i = tile.begin + (r < tile.count ? r : 0);
    rows[r] = RowOfX(p, tile.expert, i);
  }
  const auto begin = static_cast<std::int32_t>(blockIdx.y) * kCoreOuts;
  const std::int32_t end = begin + kCoreOuts < p.out_features ? begin + kCoreOuts : p.out_features;
  for (std::int32_t out = begin + static_cast<std::int32_t>(threadIdx.x) / 32; out < end;
       out += kWarps) {
    const W* weight = p.weights[tile.expert] + std::int64_t{out} * p.in_features;
    float sums[kCoreRows] = {};
#pragma unroll 1  // more takes more registers than there are
    for (std::int32_t dim = lane; dim < p.in_features; dim += 32) {
      const float value = Widen(weight[dim]);
#pragma unroll
      for (int r = 0; r < kCoreRows; ++r) sums[r] += Widen(Narrow<W>(rows[r][dim])) * value;
    }
#pragma unroll
    for (int r = 0; r < kCoreRows; ++r) {
      const float sum = WarpSum(sums[r]);
      if (lane == 0 && r < tile.count) RowOfY(p, tile.expert, tile.begin + r)[out] = sum;
    }
  }
}

// Enough blocks for any way in which the rows may be spread over experts.
template <typename W>
dim3 GridOf(const GroupedLinearParams<W>& p, int rows, int outs) {
  const std::int32_t tiles = p.expert_begin != nullptr
                                 ? p.max_rows / rows + std::min(p.num_experts, p.max_rows)
                                 : p.num_experts * ((p.max_rows + rows - 1) / rows);
  return dim3(static_cast<unsigned>(tiles),
              static_cast<unsigned>((p.out_features + outs - 1) / outs));
}

// Reads of x by four, writes of y by two.
template <typename W>
bool Aligned(const GroupedLinearParams<W>& p) {
  return p.in_features % 8 == 0 && PacksFit(p.x, p.x_stride, p.x_expert_stride) &&
         reinterpret_cast<std::uintptr_t>(p.y) % 8 == 0 &&
         (p.out_features | p.y_stride | p.y_expert_stride) % 2 == 0;
}

template <typename S>
absl::Status LaunchTensorCores(const GroupedLinearParams<typename S::W>& p, CudaStream& stream) {
  return Launch<TensorCoreGroupedKernel<S>>("GroupedLinear", GridOf(p, S::kRows, S::kOuts),
                                            kThreads, S::kSharedBytes, stream.handle(), p);
}

}  // namespace

template <typename W>
absl::Status GroupedLinear(const GroupedLinearParams<W>& p, CudaStream& stream) {
  if (p.max_rows == 0 || p.num_experts == 0 || p.out_features == 0) return absl::OkStatus();
  if constexpr (!std::is_same_v<W, float>) {
    if (Aligned(p)) {
      // Where experts have more than a few rows, weights are read once for more of them.
      return p.max_rows / (p.expert_begin != nullptr ? p.num_experts : 1) > 16
                 ? LaunchTensorCores<Tiles<W, 64>>(p, stream)
                 : LaunchTensorCores<Tiles<W, 16>>(p, stream);
    }
  }
  return Launch<GroupedKernel<W>>("GroupedLinear", GridOf(p, kCoreRows, kCoreOuts), kThreads, 0,
                                  stream.handle(), p);
}

template absl::Status GroupedLinear<float>(const GroupedLinearParams<float>&, CudaStream&);
template absl::Status GroupedLinear<BFloat16>(const GroupedLinearParams<BFloat16>&, CudaStream&);
template absl::Status GroupedLinear<Float16>(const GroupedLinearParams<Float16>&, CudaStream&);

}  // namespace weft::kernels::cuda
