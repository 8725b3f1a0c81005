#include "tests/bench/machine_limits.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "benchmark/benchmark.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/machine_limits.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChains = 10;  // as many as registers of any target hold

// Independent chains; the floating-point operations done.
double FmaLoop(std::int64_t rounds) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999F);
  const auto b = hn::Set(d, 0.001F);
  auto x0 = a, x1 = a, x2 = a, x3 = a, x4 = a, x5 = a, x6 = a, x7 = a, x8 = a, x9 = a;
  // The compiler must not see that they are equal.
  for (auto* x : {&x0, &x1, &x2, &x3, &x4, &x5, &x6, &x7, &x8, &x9}) benchmark::DoNotOptimize(*x);
  for (std::int64_t i = 0; i < rounds; ++i) {
    x0 = hn::MulAdd(x0, a, b);
    x1 = hn::MulAdd(x1, a, b);
    x2 = hn::MulAdd(x2, a, b);
    x3 = hn::MulAdd(x3, a, b);
    x4 = hn::MulAdd(x4, a, b);
    x5 = hn::MulAdd(x5, a, b);
    x6 = hn::MulAdd(x6, a, b);
    x7 = hn::MulAdd(x7, a, b);
    x8 = hn::MulAdd(x8, a, b);
    x9 = hn::MulAdd(x9, a, b);
  }
  x0 =
      hn::Add(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)), hn::Add(hn::Add(x4, x5), hn::Add(x6, x7)));
  benchmark::DoNotOptimize(hn::GetLane(hn::Add(x0, hn::Add(x8, x9))));
  return 2.0 * kChains * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

void ReadLoop(const float* HWY_RESTRICT data, std::int64_t floats) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto a = hn::Zero(d), b = a, e = a, f = a;
  for (std::int64_t i = 0; i + 4 * lanes <= floats; i += 4 * lanes) {
    a = hn::Add(a, hn::LoadU(d, data + i));
    b = hn::Add(b, hn::LoadU(d, data + i + lanes));
    e = hn::Add(e, hn::LoadU(d, data + i + 2 * lanes));
    f = hn::Add(f, hn::LoadU(d, data + i + 3 * lanes));
  }
  benchmark::DoNotOptimize(hn::GetLane(hn::Add(hn::Add(a, b), hn::Add(e, f))));
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

namespace {

#ifdef __x86_64__
// As FmaLoop, of dot products of pairs of bfloat16.
__attribute__((target("avx512f,avx512bf16"))) double DotLoop(std::int64_t rounds) {
  constexpr int kSums = 16;
  __m512 sums[kSums];
  for (__m512& sum : sums) {
    sum = _mm512_set1_ps(0.5F);
    benchmark::DoNotOptimize(sum);
  }
  const auto ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) sums[sum] = _mm512_dpbf16_ps(sums[sum], ones, ones);
  }
  for (const __m512& sum : sums) benchmark::DoNotOptimize(sum);
  return 64.0 * kSums * static_cast<double>(rounds);
}
#else
double DotLoop(std::int64_t /*rounds*/) { return 0; }
#endif

}  // namespace

HWY_EXPORT(FmaLoop);
HWY_EXPORT(ReadLoop);

double NowSeconds(const CpuStream& stream) {
  timespec now;
  clock_gettime(stream.num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

MachineLimits MeasureMachineLimits(CpuStream& stream) {
  constexpr std::int64_t kBytes = std::int64_t{128} << 20;
  constexpr std::int64_t kPieces = 256;
  constexpr int kTries = 6;
  static const Buffer memory = [] {
    Buffer buffer = *Buffer::Allocate(kBytes);
    std::fill_n(buffer.as<float>(), kBytes / 4, 1.0F);
    return buffer;
  }();
  ThreadPool& pool = stream.pool();
  MachineLimits limits;
  const auto operations_per_second = [&](double (*loop)(std::int64_t)) {
    double operations = 0.0;
    const double start = NowSeconds(stream);
    pool.ParallelFor(pool.num_threads(), [&](std::int64_t index, int /*thread*/) {
      const double done = loop(300'000);
      if (index == 0) operations = done * pool.num_threads();
    });
    return operations / (NowSeconds(stream) - start);
  };
  for (int i = 0; i < kTries; ++i) {
    limits.flops_per_second =
        std::max(limits.flops_per_second, operations_per_second(HWY_DYNAMIC_DISPATCH(FmaLoop)));
    if (HasDotProducts()) {
      limits.dot_flops_per_second =
          std::max(limits.dot_flops_per_second, operations_per_second(DotLoop));
    }
    const double start = NowSeconds(stream);
    pool.ParallelFor(kPieces, [&](std::int64_t index, int /*thread*/) {
      constexpr std::int64_t kFloats = kBytes / 4 / kPieces;
      HWY_DYNAMIC_DISPATCH(ReadLoop)(memory.as<float>() + index * kFloats, kFloats);
    });
    const double seconds = NowSeconds(stream) - start;
    limits.bytes_per_second = std::max(limits.bytes_per_second, kBytes / seconds);
  }
  return limits;
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
