#include "kernels/cuda/filtered_sample.h"
#include "kernels/cuda/gumbel.h"
#include "kernels/cuda/values.h"
#include "kernels/token_weight.h"

// Every filter leaves a first part of the tokens in one order, the highest logit first and of equal
// ones the lowest id. Where it ends is found by halving the range of logits, with a sum over the
// tokens at each step.

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// Ascends with the logit; the same for both zeros.
__device__ __forceinline__ std::uint32_t KeyOf(float logit) {
  const std::uint32_t bits = __float_as_uint(logit == 0.0F ? 0.0F : logit);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float LogitOf(std::uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key & 0x7FFFFFFFU : ~key);
}

struct Sum {
  __device__ std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const { return a + b; }
};
struct Max {
  __device__ std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const {
    return a > b ? a : b;
  }
};

// What a block shares.
struct Scratch {
  std::uint64_t of_warp[kWarps];
  Candidate best_of_warp[kWarps];
};

// Over the block's threads, for each of them.
template <typename Op>
__device__ __forceinline__ std::uint64_t BlockReduce(std::uint64_t value, Scratch& scratch) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = Op()(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  __syncthreads();  // scratch has been read
  if (threadIdx.x % 32 == 0) scratch.of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch.of_warp[0];
  for (int i = 1; i < kWarps; ++i) value = Op()(value, scratch.of_warp[i]);
  return value;
}

struct Row {
  const float* logits;  // of the first slice
  std::int64_t slice_stride;
  std::int32_t num_slices;
  std::int32_t vocab_size;

  __device__ std::int32_t SliceBegin(std::int32_t slice) const {
    return static_cast<std::int32_t>(std::int64_t{slice} * vocab_size / num_slices);
  }
};

// Op over value(id, logit) of all tokens.
template <typename Op, typename Value>
__device__ __forceinline__ std::uint64_t Over(const Row& row, Scratch& scratch,
                                              const Value& value) {
  std::uint64_t all = 0;
  for (std::int32_t slice = 0; slice < row.num_slices; ++slice) {
    const std::int32_t begin = row.SliceBegin(slice);
    const std::int32_t end = row.SliceBegin(slice + 1);
    const float* logits = row.logits + slice * row.slice_stride;
    for (std::int32_t id = begin + static_cast<std::int32_t>(threadIdx.x); id < end;
         id += kThreads) {
      all = Op()(all, value(id, logits[id - begin]));
    }
  }
  return BlockReduce<Op>(all, scratch);
}

// What is kept: every token with a higher key, and the first `ties` with this one.
struct Cutoff {
  std::uint32_t key;
  std::int32_t ties;  // at least 1
};

__device__ __forceinline__ std::int32_t CountOf(const Row& row, Scratch& scratch,
                                                std::uint32_t key) {
  return static_cast<std::int32_t>(Over<Sum>(
      row, scratch, [=](std::int32_t, float logit) { return KeyOf(logit) == key ? 1U : 0U; }));
}

// The fewest first ones of what is kept of which `reached` the sum of their `measure` is: not of 0
// ones, and of all that are kept.
template <typename Measure, typename Reached>
__device__ __forceinline__ Cutoff Shortened(const Row& row, Scratch& scratch, Cutoff kept,
                                            std::uint32_t highest, const Measure& measure,
                                            const Reached& reached) {
  std::uint32_t low = kept.key;  // reached by the tokens from here on
  std::uint32_t high = highest + 1;
  std::uint64_t above = 0;  // of those from `high` on
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    const std::uint64_t sum =
        above + Over<Sum>(row, scratch, [&](std::int32_t, float logit) -> std::uint64_t {
          const std::uint32_t key = KeyOf(logit);
          return key >= middle && key < high ? measure(logit) : 0;
        });
    if (reached(sum)) {
      low = middle;
    } else {
      above = sum;
      high = middle;
    }
  }
  const std::uint64_t each = measure(LogitOf(low));
  std::int32_t too_few = 0;
  std::int32_t enough = low == kept.key ? kept.ties : CountOf(row, scratch, low);
  while (enough - too_few > 1) {
    const std::int32_t middle = too_few + (enough - too_few) / 2;
    if (reached(above + middle * each)) {
      enough = middle;
    } else {
      too_few = middle;
    }
  }
  return {low, enough};
}

__device__ __forceinline__ Cutoff Filter(const Row& row, Scratch& scratch, const FilteredRow& ask,
                                         std::uint32_t highest) {
  const float highest_logit = LogitOf(highest);
  // The lowest key that min_p leaves, as the highest of its complements.
  const std::uint64_t complement =
      Over<Max>(row, scratch, [&](std::int32_t, float logit) -> std::uint64_t {
        const bool stays =
            ask.log_min_p == -INFINITY || logit == highest_logit ||
            (static_cast<double>(logit) - highest_logit) / ask.temperature >= ask.log_min_p;
        return stays ? ~KeyOf(logit) : 0U;
      });
  Cutoff kept = {~static_cast<std::uint32_t>(complement), 0};
  kept.ties = CountOf(row, scratch, kept.key);

  const auto wanted_count = static_cast<std::uint64_t>(ask.top_k);
  if (wanted_count > 0) {
    const auto one = [](float) { return std::uint64_t{1}; };
    const std::uint64_t count =
        Over<Sum>(row, scratch, [&](std::int32_t, float logit) -> std::uint64_t {
          return KeyOf(logit) >= kept.key ? 1 : 0;
        });
    if (wanted_count < count) {
      kept = Shortened(row, scratch, kept, highest, one,
                       [=](std::uint64_t sum) { return sum >= wanted_count; });
    }
  }
  if (ask.top_p < 1.0F) {
    const auto weight = [&](float logit) {
      return TokenWeight(logit, highest_logit, ask.temperature);
    };
    const std::uint64_t total = Over<Sum>(row, scratch,
                                          [&](std::int32_t, float logit) -> std::uint64_t {
                                            return KeyOf(logit) > kept.key ? weight(logit) : 0;
                                          }) +
                                kept.ties * weight(LogitOf(kept.key));
    const double wanted = ask.top_p * static_cast<double>(total);
    kept = Shortened(row, scratch, kept, highest, weight, [=](std::uint64_t sum) {
      return sum > 0 && static_cast<double>(sum) >= wanted;
    });
  }
  return kept;
}

// Behind the last of the tokens with the cutoff's key that are kept.
__device__ __forceinline__ std::int32_t EndOfTies(const Row& row, Scratch& scratch, Cutoff kept) {
  std::int32_t low = 0;
  std::int32_t high = row.vocab_size;
  if (CountOf(row, scratch, kept.key) == kept.ties) return high;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    const std::uint64_t before =
        Over<Sum>(row, scratch, [&](std::int32_t id, float logit) -> std::uint64_t {
          return id < middle && KeyOf(logit) == kept.key ? 1 : 0;
        });
    if (before >= static_cast<std::uint64_t>(kept.ties)) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return high;
}

__global__ void __launch_bounds__(kThreads) FilteredSampleKernel(FilteredSampleParams p) {
  WEFT_SHARED(Scratch, scratch_memory, 1);
  Scratch& scratch = *scratch_memory;
  const FilteredRow ask = p.rows[blockIdx.x];
  const Row row = {.logits = p.logits + std::int64_t{blockIdx.x} * p.logits_stride,
                   .slice_stride = p.num_rows * p.logits_stride,
                   .num_slices = p.num_slices,
                   .vocab_size = p.vocab_size};

  // No number has this key.
  constexpr std::uint32_t kNaN = 0xFFFFFFFFU;
  const auto highest = static_cast<std::uint32_t>(
      Over<Max>(row, scratch, [](std::int32_t, float logit) -> std::uint64_t {
        return isnan(logit) ? kNaN : KeyOf(logit);
      }));
  if (highest == kNaN) {
    if (threadIdx.x == 0) p.out[blockIdx.x] = {-1, 0.0F};
    return;  // the whole block
  }
  const Cutoff kept = Filter(row, scratch, ask, highest);
  const std::int32_t end_of_ties = EndOfTies(row, scratch, kept);

  Candidate best = {-INFINITY, kNone};
  Over<Max>(row, scratch, [&](std::int32_t id, float logit) -> std::uint64_t {
    const std::uint32_t key = KeyOf(logit);
    if (key < kept.key || (key == kept.key && id >= end_of_ties)) return 0;
    const Candidate candidate = {
        __fadd_rn(__fdiv_rn(logit, ask.temperature), GumbelOf(ask.seed, ask.position, id)), id};
    if (Better(candidate, best)) best = candidate;
    return 0;
  });
  best = BestOfWarp(best);
  if (threadIdx.x % 32 == 0) scratch.best_of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) {
    if (Better(scratch.best_of_warp[i], best)) best = scratch.best_of_warp[i];
  }
  const auto slice = static_cast<std::int32_t>(
      ((best.index + std::int64_t{1}) * row.num_slices - 1) / row.vocab_size);
  p.out[blockIdx.x] = {best.index,
                       row.logits[slice * row.slice_stride + best.index - row.SliceBegin(slice)]};
}

}  // namespace

absl::Status FilteredSample(const FilteredSampleParams& params, CudaStream& stream) {
  if (params.num_rows == 0) return absl::OkStatus();
  return Launch<FilteredSampleKernel>("FilteredSample", static_cast<unsigned>(params.num_rows),
                                      kThreads, 0, stream.handle(), params);
}

}  // namespace weft::kernels::cuda
