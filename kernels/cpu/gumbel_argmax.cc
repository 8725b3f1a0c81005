#include "kernels/gumbel_argmax.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/launch.h"
#include "kernels/cpu/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gumbel_argmax.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, which it would disable.
#include "hwy/contrib/math/math-inl.h"

#ifndef WEFT_KERNELS_CPU_GUMBEL_ARGMAX_ONCE_
#define WEFT_KERNELS_CPU_GUMBEL_ARGMAX_ONCE_
namespace weft::kernels {

// One piece of a row; pieces merge in order.
struct SlicePart {
  float max;  // of the logits
  float sum;  // of exp(logit - max)
  float score;
  std::int32_t index;
  bool has_nan;
};

}  // namespace weft::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Tokens whose noise is on the stack at a time; a multiple of 4 lanes of every target.
constexpr std::int64_t kNoiseTokens = 1024;

// log(m * 2^e) for m = 1 + f in [sqrt(1/2), sqrt(2)). Multiplications and additions only, in one
// order, so that all targets (and a GPU) give the same bits. Coefficients: Cephes logf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LogOf(D d, V f, V e) {
  const V z = hn::Mul(f, f);
  V y = hn::Set(d, 7.0376836292E-2F);
  for (const float c : {-1.1514610310E-1F, 1.1676998740E-1F, -1.2420140846E-1F, 1.4249322787E-1F,
                        -1.6668057665E-1F, 2.0000714765E-1F, -2.4999993993E-1F, 3.3333331174E-1F}) {
    y = hn::Add(hn::Mul(y, f), hn::Set(d, c));
  }
  y = hn::Mul(hn::Mul(y, f), z);
  y = hn::Add(y, hn::Mul(e, hn::Set(d, -2.12194440E-4F)));
  y = hn::Sub(y, hn::Mul(hn::Set(d, 0.5F), z));
  return hn::Add(hn::Add(f, y), hn::Mul(e, hn::Set(d, 0.693359375F)));
}

// f and e of a positive, normal x for LogOf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void SplitForLog(D d, V x, V& f, V& e) {
  const hn::RebindToSigned<D> di;
  const auto kSqrtHalf = hn::Set(di, 0x3F3504F3);
  const auto shifted = hn::Sub(hn::BitCast(di, x), kSqrtHalf);
  const auto mantissa = hn::Add(hn::And(shifted, hn::Set(di, 0x7FFFFF)), kSqrtHalf);
  e = hn::ConvertTo(d, hn::ShiftRight<23>(shifted));
  f = hn::Sub(hn::BitCast(d, mantissa), hn::Set(d, 1.0F));
}

// -log(-log(u)), u = (bits + 1/2) / 2^32, exact to ~1e-7 also where u is next to 1: there the log
// is taken of 1 - w with w = (~bits + 1/2) / 2^32.
template <class D, class V = hn::Vec<D>, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE V GumbelOfBits(D d, VU bits) {
  const hn::RebindToSigned<D> di;
  const V half = hn::Set(d, 0.5F);
  const V unit = hn::Set(d, 0x1p-32F);
  const auto sbits = hn::BitCast(di, bits);
  const auto upper = hn::BroadcastSignBit(sbits);  // all ones where u >= 1/2
  const auto folded = hn::Xor(sbits, upper);       // bits or ~bits: below 2^31
  const V w = hn::Mul(hn::Add(hn::ConvertTo(d, folded), half), unit);
  const auto is_upper = hn::MaskFromVec(hn::BitCast(d, upper));
  const V u = hn::IfThenElse(is_upper, hn::Sub(hn::Set(d, 1.0F), w), w);
  V f;
  V e;
  SplitForLog(d, u, f, e);
  const auto small = hn::And(is_upper, hn::Lt(w, hn::Set(d, 0.29F)));
  f = hn::IfThenElse(small, hn::Neg(w), f);
  e = hn::IfThenElse(small, hn::Zero(d), e);
  const V exponential = hn::Neg(LogOf(d, f, e));
  SplitForLog(d, exponential, f, e);
  return hn::Neg(LogOf(d, f, e));
}

float NoiseOfBits(std::uint32_t bits) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(GumbelOfBits(d, hn::Set(hn::RebindToUnsigned<decltype(d)>(), bits)));
}

#if HWY_TARGET == HWY_SCALAR

// Random words of tokens 4 * block ... of (seed, position), `count` a multiple of 4.
void PhiloxWords(std::uint64_t seed, std::int64_t position, std::uint32_t block, std::int64_t count,
                 std::uint32_t* HWY_RESTRICT out) {
  for (std::int64_t i = 0; i < count; i += 4, ++block) {
    const auto words =
        Philox4x32({static_cast<std::uint32_t>(position),
                    static_cast<std::uint32_t>(position >> 32), block, 0},
                   {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    std::copy(words.begin(), words.end(), out + i);
  }
}

#else

template <class DU, class V = hn::Vec<DU>>
HWY_INLINE void MultiplyWide(DU du, V a, std::uint32_t multiplier, V& high, V& low) {
  const hn::RepartitionToWide<DU> dw;
  const V m = hn::Set(du, multiplier);
  const auto even = hn::MulEven(a, m);
  const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(dw, a))), m);
  high = hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)), hn::BitCast(du, even));
}

// As above, a block a lane; `count` is a multiple of 4 lanes.
void PhiloxWords(std::uint64_t seed, std::int64_t position, std::uint32_t block, std::int64_t count,
                 std::uint32_t* HWY_RESTRICT out) {
  const hn::ScalableTag<std::uint32_t> du;
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(du));
  for (std::int64_t i = 0; i < count; i += 4 * lanes, block += lanes) {
    auto c0 = hn::Set(du, static_cast<std::uint32_t>(position));
    auto c1 = hn::Set(du, static_cast<std::uint32_t>(position >> 32));
    auto c2 = hn::Iota(du, block);
    auto c3 = hn::Zero(du);
    auto key0 = static_cast<std::uint32_t>(seed);
    auto key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      auto high0 = c0;
      auto low0 = c0;
      auto high1 = c0;
      auto low1 = c0;
      MultiplyWide(du, c0, kPhiloxMultiplier0, high0, low0);
      MultiplyWide(du, c2, kPhiloxMultiplier1, high1, low1);
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(du, key0));
      c1 = low1;
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(du, key1));
      c3 = low0;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    hn::StoreInterleaved4(c0, c1, c2, c3, du, out + i);
  }
}

#endif

// The piece [begin, end) of row `row`.
template <bool kNoise>
SlicePart PartOf(const GumbelArgmaxParams& p, std::int64_t row, std::int64_t begin,
                 std::int64_t end) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::RebindToUnsigned<decltype(d)> du;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const float* logits = p.logits + row * p.logits_stride;
  const auto temperature = hn::Set(d, p.temperature[row]);

  HWY_ALIGN std::uint32_t words[kNoiseTokens];
  std::int64_t words_begin = 0;  // global token ids whose words are there
  std::int64_t words_end = 0;

  auto max = hn::Set(d, kLowest);
  auto best = hn::Set(d, kLowest);
  auto best_index = hn::Set(di, std::numeric_limits<std::int32_t>::max());
  auto nan = hn::Zero(d);
  const auto step = [&](auto value, auto noise_bits, auto index, auto valid) HWY_ATTR {
    auto score = value;
    if constexpr (kNoise) {
      score = hn::Add(hn::Div(value, temperature), GumbelOfBits(d, noise_bits));
    }
    nan = hn::Or(nan, hn::VecFromMask(d, hn::And(valid, hn::IsNaN(value))));
    max = hn::IfThenElse(valid, hn::Max(max, value), max);
    // An index of the largest integer is "none yet": -inf must win over it.
    const auto none = hn::RebindMask(
        d, hn::Eq(best_index, hn::Set(di, std::numeric_limits<std::int32_t>::max())));
    const auto better = hn::And(valid, hn::Or(none, hn::Gt(score, best)));
    best = hn::IfThenElse(better, score, best);
    best_index = hn::IfThenElse(hn::RebindMask(di, better), index, best_index);
  };
  HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)] = {};
  for (std::int64_t i = begin; i < end; i += lanes) {
    auto bits = hn::Zero(du);
    if constexpr (kNoise) {
      const std::int64_t token = p.first_token_id + i;
      if (token + lanes > words_end || token < words_begin) {
        words_begin = token / 4 * 4;
        const std::int64_t wanted = p.first_token_id + end + lanes - words_begin;
        const std::int64_t count = std::min(kNoiseTokens, CeilDiv(wanted, 4 * lanes) * 4 * lanes);
        words_end = words_begin + count;
        PhiloxWords(p.seed[row], p.position[row], static_cast<std::uint32_t>(words_begin / 4),
                    count, words);
      }
      bits = hn::LoadU(du, words + (token - words_begin));
    }
    const auto index = hn::Iota(di, static_cast<std::int32_t>(i));
    if (i + lanes <= end) {
      step(hn::LoadU(d, logits + i), bits, index, hn::FirstN(d, lanes));
    } else {
      std::copy(logits + i, logits + end, tail);
      step(hn::Load(d, tail), bits, index, hn::FirstN(d, end - i));
    }
  }

  SlicePart part;
  part.has_nan = !hn::AllFalse(d, hn::IsNaN(nan));
  part.max = hn::GetLane(hn::MaxOfLanes(d, max));
  HWY_ALIGN float scores[HWY_MAX_BYTES / sizeof(float)];
  HWY_ALIGN std::int32_t indices[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(best, d, scores);
  hn::Store(best_index, di, indices);
  part.index = std::numeric_limits<std::int32_t>::max();
  part.score = kLowest;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    if (scores[lane] > part.score || (scores[lane] == part.score && indices[lane] < part.index)) {
      part.score = scores[lane];
      part.index = indices[lane];
    }
  }

  part.sum = 0.0F;
  if (part.has_nan || std::isinf(part.max)) return part;
  auto sum = hn::Zero(d);
  const auto shift = hn::Set(d, part.max);
  std::int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    sum = hn::Add(sum, hn::Exp(d, hn::Sub(hn::LoadU(d, logits + i), shift)));
  }
  part.sum = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < end; ++i) part.sum += std::exp(logits[i] - part.max);
  return part;
}

void SliceTask(const GumbelArgmaxParams& p, std::int64_t row, std::int64_t begin, std::int64_t end,
               SlicePart* part) {
  *part = p.temperature[row] == 0.0F ? PartOf<false>(p, row, begin, end)
                                     : PartOf<true>(p, row, begin, end);
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(NoiseOfBits);
HWY_EXPORT(SliceTask);

namespace {

// Pieces of a row: they depend on the vocabulary only, so that sums do not depend on threads.
constexpr std::int64_t kMaxPieces = 32;
constexpr std::int64_t kMinPieceTokens = 1024;

ArgmaxResult Merge(const SlicePart* parts, std::int64_t num_parts, std::int32_t first_token_id) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  SlicePart all = parts[0];
  for (std::int64_t i = 1; i < num_parts; ++i) {
    const SlicePart& part = parts[i];
    all.has_nan |= part.has_nan;
    const float max = std::max(all.max, part.max);
    if (std::isfinite(max)) {
      all.sum = all.sum * std::exp(all.max - max) + part.sum * std::exp(part.max - max);
    }
    all.max = max;
    if (part.score > all.score) {
      all.score = part.score;
      all.index = part.index;
    }
  }
  if (all.has_nan) {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
    return {.score = kInfinity, .logsumexp = kNaN, .token_id = -1};
  }
  return {.score = all.score,
          .logsumexp = std::isinf(all.max) ? all.max : all.max + std::log(all.sum),
          .token_id = first_token_id + all.index};
}

}  // namespace

float GumbelNoise(std::uint64_t seed, std::int64_t position, std::int32_t token_id) {
  const auto id = static_cast<std::uint32_t>(token_id);
  const auto words = Philox4x32(
      {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), id / 4, 0},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return HWY_DYNAMIC_DISPATCH(NoiseOfBits)(words[id % 4]);
}

absl::Status GumbelArgmax(const GumbelArgmaxParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->GumbelArgmax(params);
  DCHECK(params.vocab_size > 0);
  ThreadPool& pool = PoolOf(stream);
  const auto slice = HWY_DYNAMIC_DISPATCH(SliceTask);
  const std::int64_t piece = std::max(kMinPieceTokens, CeilDiv(params.vocab_size, kMaxPieces));
  const std::int64_t num_pieces = CeilDiv(params.vocab_size, piece);
  const auto run = [&](std::int64_t row, std::int64_t index, SlicePart* parts) {
    slice(params, row, index * piece,
          std::min<std::int64_t>(params.vocab_size, (index + 1) * piece), parts + index);
  };
  if (params.num_rows >= 4 * pool.num_threads()) {
    pool.ParallelFor(params.num_rows, [&](std::int64_t row, int /*thread*/) {
      std::array<SlicePart, kMaxPieces> parts;
      for (std::int64_t index = 0; index < num_pieces; ++index) run(row, index, parts.data());
      params.out[row] = Merge(parts.data(), num_pieces, params.first_token_id);
    });
    return absl::OkStatus();
  }
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    std::array<SlicePart, kMaxPieces> parts;
    pool.ParallelFor(num_pieces,
                     [&](std::int64_t index, int /*thread*/) { run(row, index, parts.data()); });
    params.out[row] = Merge(parts.data(), num_pieces, params.first_token_id);
  }
  return absl::OkStatus();
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
