#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/json_reader.h"
#include "worker/model/model_config.h"

// How model_config.cc, model_families.cc, family_readers.cc and rope_config.cc read config.json
// together.

namespace weft {

// Above any model there is; the product of two fits in 64 bits.
inline constexpr std::int64_t kMaxDimension = 1 << 24;
inline constexpr std::int64_t kMaxLayers = 1 << 16;
inline constexpr std::int64_t kMaxPositions = std::numeric_limits<std::int32_t>::max();

inline std::int32_t Dimension(JsonFields& fields, const std::string& key) {
  return static_cast<std::int32_t>(fields.Int(key, 1, kMaxDimension));
}

// Rotary embeddings, in both layouts: `rope_parameters` with everything in it, or `rope_theta`
// beside `rope_scaling`.
absl::StatusOr<RopeConfig> ReadRope(JsonFields& fields, std::int64_t max_position_embeddings,
                                    double default_theta);

// All but what model_config.h calls common to all families: the architecture, found by
// `architectures` or `model_type`, and what its family's keys say.
absl::StatusOr<ModelConfig> ReadFamily(JsonFields& fields);

// What some families have beside what is common to all: family_readers.cc.
void ReadMixtralExperts(JsonFields& fields, ModelConfig& config);
void ReadQwen3Experts(JsonFields& fields, ModelConfig& config);
void ReadDeepseekV2(JsonFields& fields, ModelConfig& config);
void ReadDeepseekV3(JsonFields& fields, ModelConfig& config);

}  // namespace weft
