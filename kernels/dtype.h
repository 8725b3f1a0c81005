#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "server/base/check.h"

namespace weft {

// Storage types of weights and KV. Activations and accumulators are fp32 on the CPU.
enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr int DTypeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The names of --dtype and config.json: "float32", "bfloat16", "float16".
constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  CheckFailed(__FILE__, __LINE__, "dtype", "unreachable");
}

constexpr std::optional<DType> ParseDType(std::string_view name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  return std::nullopt;
}

}  // namespace weft
