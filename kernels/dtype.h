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

// How a packed weight stores its values: as a DType, or as integers, kQuantGroup inputs of an
// output together with a float16 scale: 8.5 and 4.5 bits a value.
enum class WeightFormat : std::uint8_t { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

inline constexpr std::int32_t kQuantGroup = 32;

constexpr WeightFormat FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return WeightFormat::kFloat32;
    case DType::kBFloat16:
      return WeightFormat::kBFloat16;
    case DType::kFloat16:
      return WeightFormat::kFloat16;
  }
  CheckFailed(__FILE__, __LINE__, "dtype", "unreachable");
}

// Absent for integers.
constexpr std::optional<DType> DTypeOf(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return DType::kFloat32;
    case WeightFormat::kBFloat16:
      return DType::kBFloat16;
    case WeightFormat::kFloat16:
      return DType::kFloat16;
    case WeightFormat::kInt8:
    case WeightFormat::kInt4:
      return std::nullopt;
  }
  CheckFailed(__FILE__, __LINE__, "format", "unreachable");
}

constexpr std::string_view FormatName(WeightFormat format) {
  if (const std::optional<DType> dtype = DTypeOf(format)) return DTypeName(*dtype);
  return format == WeightFormat::kInt8 ? "int8" : "int4";
}

// The values of --quantization; absent for any other.
constexpr std::optional<WeightFormat> ParseQuantization(std::string_view name) {
  if (name == "int8") return WeightFormat::kInt8;
  if (name == "int4") return WeightFormat::kInt4;
  return std::nullopt;
}

}  // namespace weft
