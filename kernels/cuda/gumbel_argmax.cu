#include <algorithm>

#include "kernels/cuda/gumbel.h"
#include "kernels/cuda/gumbel_argmax.h"
#include "kernels/cuda/values.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Pieces of a row, of the vocabulary's size alone, that merge in order.
constexpr std::int32_t kMaxPieces = 32;
constexpr std::int32_t kMinPieceTokens = 1024;

struct SlicePart {
  float max;  // of the logits
  float sum;  // of exp(logit - max)
  float score;
  std::int32_t index;  // kNone: no candidate yet
  std::int32_t has_nan;
};

struct Args {
  GumbelArgmaxParams p;
  SlicePart* parts;  // [num_rows, num_pieces]
  std::int32_t piece_tokens;
  std::int32_t num_pieces;
};

struct Found {
  Candidate best;
  float max;
  bool has_nan;
};

// What a thread finds among its tokens of [begin, end).
__device__ __forceinline__ Found Scan(const Args& a, std::int64_t row, std::int32_t begin,
                                      std::int32_t end) {
  const GumbelArgmaxParams& p = a.p;
  const float* logits = p.logits + row * p.logits_stride;
  const float temperature = p.temperature[row];
  Found found = {{-INFINITY, kNone}, -INFINITY, false};
  // Four tokens share a Philox block; `first_token_id` need not be a multiple of four.
  const std::int32_t first_block = (p.first_token_id + begin) / 4;
  const std::int32_t last_block = (p.first_token_id + end - 1) / 4;
  for (std::int32_t block = first_block + static_cast<std::int32_t>(threadIdx.x);
       block <= last_block; block += kThreads) {
    Words words = {};
    if (temperature != 0.0F) {
      words = Philox(p.seed[row], p.position[row], static_cast<unsigned>(block));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int32_t i = block * 4 + j - p.first_token_id;
      if (i < begin || i >= end) continue;
      const float logit = logits[i];
      found.has_nan |= isnan(logit);
      found.max = fmaxf(found.max, logit);
      const float score = temperature == 0.0F
                              ? logit
                              : __fadd_rn(__fdiv_rn(logit, temperature), GumbelOfBits(words.w[j]));
      const Candidate candidate = {score, i};
      if (Better(candidate, found.best)) found.best = candidate;
    }
  }
  return found;
}

__global__ void __launch_bounds__(kThreads) SliceKernel(Args a) {
  constexpr int kWarps = kThreads / 32;
  WEFT_SHARED(Found, of_warp, kWarps);
  WEFT_SHARED(float, scratch, 32);
  const std::int64_t row = blockIdx.y;
  const auto piece = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t begin = piece * a.piece_tokens;
  const std::int32_t rest = a.p.vocab_size - begin;
  const std::int32_t end = begin + (rest < a.piece_tokens ? rest : a.piece_tokens);

  Found found = Scan(a, row, begin, end);
  found.best = BestOfWarp(found.best);
  found.max = WarpMax(found.max);
  found.has_nan = __any_sync(kAllLanes, found.has_nan);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) {
    if (Better(of_warp[i].best, found.best)) found.best = of_warp[i].best;
    found.max = fmaxf(found.max, of_warp[i].max);
    found.has_nan |= of_warp[i].has_nan;
  }

  float sum = 0.0F;
  if (!isinf(found.max)) {
    const float* logits = a.p.logits + row * a.p.logits_stride;
    for (std::int32_t i = begin + static_cast<std::int32_t>(threadIdx.x); i < end; i += kThreads) {
      sum += expf(logits[i] - found.max);
    }
  }
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) {
    a.parts[row * a.num_pieces + piece] = {found.max, sum, found.best.score, found.best.index,
                                           found.has_nan ? 1 : 0};
  }
}

__global__ void __launch_bounds__(kThreads) MergeKernel(Args a) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= a.p.num_rows) return;
  const SlicePart* parts = a.parts + row * a.num_pieces;
  Candidate best = {-INFINITY, kNone};
  float max = -INFINITY;
  bool has_nan = false;
  for (std::int32_t i = 0; i < a.num_pieces; ++i) {
    const Candidate candidate = {parts[i].score, parts[i].index};
    if (Better(candidate, best)) best = candidate;
    max = fmaxf(max, parts[i].max);
    has_nan |= parts[i].has_nan != 0;
  }
  ArgmaxResult result = {best.score, max, a.p.first_token_id + best.index};
  if (!isinf(max)) {
    float sum = 0.0F;
    for (std::int32_t i = 0; i < a.num_pieces; ++i) {
      // A piece of -inf alone has nothing to add.
      if (!isinf(parts[i].max)) sum += parts[i].sum * expf(parts[i].max - max);
    }
    result.logsumexp = max + logf(sum);
  }
  if (has_nan) result = {INFINITY, NAN, -1};
  a.p.out[row] = result;
}

}  // namespace

std::int64_t GumbelArgmaxWorkspaceBytes(std::int32_t max_rows) {
  return std::int64_t{max_rows} * kMaxPieces * static_cast<std::int64_t>(sizeof(SlicePart));
}

absl::Status GumbelArgmax(const GumbelArgmaxParams& params, void* workspace, CudaStream& stream) {
  if (params.num_rows == 0) return absl::OkStatus();
  const std::int32_t per_piece = (params.vocab_size + kMaxPieces - 1) / kMaxPieces;
  const std::int32_t piece = std::max(kMinPieceTokens, per_piece);
  const Args args = {.p = params,
                     .parts = static_cast<SlicePart*>(workspace),
                     .piece_tokens = piece,
                     .num_pieces = (params.vocab_size + piece - 1) / piece};
  const dim3 grid(static_cast<unsigned>(args.num_pieces), static_cast<unsigned>(params.num_rows));
  absl::Status status =
      Launch<SliceKernel>("GumbelArgmax", grid, kThreads, 0, stream.handle(), args);
  if (!status.ok()) return status;
  const auto blocks = static_cast<unsigned>((params.num_rows + kThreads - 1) / kThreads);
  return Launch<MergeKernel>("GumbelArgmax merge", blocks, kThreads, 0, stream.handle(), args);
}

}  // namespace weft::kernels::cuda
