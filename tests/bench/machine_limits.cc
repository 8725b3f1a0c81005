#include "tests/bench/machine_limits.h"

#include <time.h>

#include <algorithm>
#include <cstdint>

#include "benchmark/benchmark.h"
#include "kernels/device/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/machine_limits.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Independent chains, as many as registers hold; the floating-point operations done.
double FmaLoop(std::int64_t rounds) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999F);
  const auto b = hn::Set(d, 0.001F);
  auto x0 = a, x1 = b, x2 = a, x3 = b, x4 = a, x5 = b, x6 = a, x7 = b, x8 = a, x9 = b;
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
  return 20.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
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
  MachineLimits limits{0.0, 0.0};
  for (int i = 0; i < kTries; ++i) {
    double operations = 0.0;
    double start = NowSeconds(stream);
    pool.ParallelFor(pool.num_threads(), [&](std::int64_t index, int /*thread*/) {
      const double done = HWY_DYNAMIC_DISPATCH(FmaLoop)(300'000);
      if (index == 0) operations = done * pool.num_threads();
    });
    double seconds = NowSeconds(stream) - start;
    limits.flops_per_second = std::max(limits.flops_per_second, operations / seconds);

    start = NowSeconds(stream);
    pool.ParallelFor(kPieces, [&](std::int64_t index, int /*thread*/) {
      constexpr std::int64_t kFloats = kBytes / 4 / kPieces;
      HWY_DYNAMIC_DISPATCH(ReadLoop)(memory.as<float>() + index * kFloats, kFloats);
    });
    seconds = NowSeconds(stream) - start;
    limits.bytes_per_second = std::max(limits.bytes_per_second, kBytes / seconds);
  }
  return limits;
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
