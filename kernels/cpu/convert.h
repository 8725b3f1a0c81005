#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"

// Conversions of single values between the storage types; round to nearest, ties to even.
// NaN stays NaN; what is too large becomes infinite.

namespace weft::kernels {

inline float Bf16ToFloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t FloatToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float F16ToFloat(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {  // infinite or NaN
    return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  }
  if (magnitude < 0x400) {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (std::uint32_t{112} << 23)));
}

inline std::uint16_t FloatToF16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x47800000) return sign | 0x7C00;  // 2^16 and above
  if (magnitude < 0x38800000) {                       // below 2^-14: subnormal or 0
    // Adding 0.5 leaves the value in units of 2^-24 in the mantissa, rounded by the hardware.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3F000000);
  }
  const std::uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return sign | static_cast<std::uint16_t>((rounded - (std::uint32_t{112} << 23)) >> 13);
}

// Element `index` of an array of `dtype` at `data`, which may be unaligned.
inline float LoadElement(const void* data, std::int64_t index, DType dtype) {
  const auto* bytes = static_cast<const std::byte*>(data) + index * DTypeBytes(dtype);
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == DType::kBFloat16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

inline void StoreElement(void* data, std::int64_t index, DType dtype, float value) {
  auto* bytes = static_cast<std::byte*>(data) + index * DTypeBytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = dtype == DType::kBFloat16 ? FloatToBf16(value) : FloatToF16(value);
  std::memcpy(bytes, &bits, sizeof(bits));
}

}  // namespace weft::kernels
