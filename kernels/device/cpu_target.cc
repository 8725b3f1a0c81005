#include "kernels/device/cpu_target.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "fmt/format.h"
#include "hwy/targets.h"

namespace weft::kernels {
namespace {

struct Target {
  std::string_view name;
  std::int64_t bit;  // Highway's
  bool dot_products = false;
};

// Best first; what kernels/CMakeLists.txt lets Highway generate.
constexpr std::array kTargets = {Target{"avx512_bf16", HWY_AVX3, true}, Target{"avx512", HWY_AVX3},
                                 Target{"avx2", HWY_AVX2}, Target{"sse4", HWY_SSE4},
                                 Target{"scalar", HWY_SCALAR}};

// Whether a target has been forced that has none.
std::atomic<bool> dots_disabled = false;
// What HasDotProducts() says: asked for each product, while Highway asks the CPU, which in a
// virtual machine takes long. Negative: not known yet.
std::atomic<int> has_dots = -1;

bool CpuHasDots() {
#ifdef __x86_64__
  static const bool has =
      __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512vnni") != 0;
  return has;
#else
  return false;
#endif
}

// The plain one is always there: it is what the compiler may assume.
bool Supported(const Target& target) {
  if (target.dot_products && (dots_disabled || !CpuHasDots())) return false;
  return target.bit == HWY_SCALAR || (hwy::SupportedTargets() & target.bit) != 0;
}

std::string SupportedNames() {
  std::string names;
  for (const Target& target : kTargets) {
    if (Supported(target)) names += fmt::format("{}{}", names.empty() ? "" : ", ", target.name);
  }
  return names;
}

}  // namespace

absl::Status ForceCpuTarget(std::string_view name) {
  hwy::DisableTargets(0);
  dots_disabled = false;
  has_dots = -1;
  if (name.empty()) return absl::OkStatus();
  std::int64_t better = 0;  // targets
  bool dots = false;
  for (const Target& target : kTargets) {
    if (target.name != name) {
      if (!target.dot_products) better |= target.bit;
      dots |= target.dot_products;
      continue;
    }
    if (!Supported(target)) {
      return absl::FailedPreconditionError(fmt::format(
          "WEFT_CPU_TARGET is {}, which this CPU lacks; it has {}", name, SupportedNames()));
    }
    hwy::DisableTargets(better);
    dots_disabled = dots;
    has_dots = -1;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("WEFT_CPU_TARGET is {}; this CPU allows {}", name, SupportedNames()));
}

absl::Status InitCpuTarget() {
  static const absl::Status status = [] {
    const char* name = std::getenv("WEFT_CPU_TARGET");
    return ForceCpuTarget(name == nullptr ? "" : name);
  }();
  return status;
}

bool HasDotProducts() {
  int has = has_dots.load(std::memory_order_relaxed);
  if (has < 0) has_dots = has = Supported(kTargets[0]) ? 1 : 0;
  return has != 0;
}

std::string_view CpuTargetName() {
  for (const Target& target : kTargets) {
    if (Supported(target)) return target.name;
  }
  return kTargets.back().name;
}

}  // namespace weft::kernels
