#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/cpu_target.h"

namespace weft::kernels {

inline std::vector<std::string> AvailableTargets() {
  EXPECT_TRUE(InitCpuTarget().ok());
  std::vector<std::string> names;
  for (const char* name : {"scalar", "sse4", "avx2", "avx512", "avx512_bf16"}) {
    if (ForceCpuTarget(name).ok()) names.emplace_back(name);
  }
  EXPECT_TRUE(ForceCpuTarget("").ok());
  return names;
}

// A test that runs on every CPU target this machine has.
class KernelTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(ForceCpuTarget(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(ForceCpuTarget("").ok()); }
};

#define WEFT_FOR_EACH_TARGET(suite)                                                 \
  INSTANTIATE_TEST_SUITE_P(Targets, suite, ::testing::ValuesIn(AvailableTargets()), \
                           [](const auto& test_case) { return std::string(test_case.param); })

using Rng = std::mt19937_64;

// Seeds that a property test draws: fewer where each costs ten times as much.
constexpr std::uint64_t NumSeeds(std::uint64_t seeds) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return (seeds + 7) / 8;
#else
  return seeds;
#endif
}

inline std::int32_t RandomInt(Rng& rng, std::int32_t low, std::int32_t high) {
  return std::uniform_int_distribution<std::int32_t>(low, high)(rng);
}

inline std::vector<float> RandomFloats(Rng& rng, std::int64_t count, float scale = 1.0F) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(rng);
  return values;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace weft::kernels
