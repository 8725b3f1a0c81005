#include <algorithm>
#include <cmath>
#include <numbers>

#include "server/base/check.h"
#include "worker/model/model_config.h"

namespace weft {
namespace {

// The reference computes in float32, and a rounding of a frequency grows with the position: the
// float operations here are in its order.

float Llama3Frequency(const RopeConfig& config, float inv_freq) {
  const auto length = static_cast<double>(config.original_max_position_embeddings);
  const auto factor = static_cast<float>(config.factor);
  const float wavelength = static_cast<float>(2 * std::numbers::pi) / inv_freq;
  if (wavelength > static_cast<float>(length / config.low_freq_factor)) return inv_freq / factor;
  if (wavelength < static_cast<float>(length / config.high_freq_factor)) return inv_freq;
  const float smooth =
      (static_cast<float>(length) / wavelength - static_cast<float>(config.low_freq_factor)) /
      static_cast<float>(config.high_freq_factor - config.low_freq_factor);
  return (1 - smooth) * inv_freq / factor + smooth * inv_freq;
}

// Where on [0, 1] each pair stands between its own frequency (0) and one divided by `factor` (1).
struct YarnRamp {
  float low;
  float width;
  float operator()(std::int32_t pair) const {
    return std::clamp((static_cast<float>(pair) - low) / width, 0.0f, 1.0f);
  }
};

YarnRamp MakeYarnRamp(const RopeConfig& config, std::int32_t rotary_dim) {
  // The pair that turns `rotations` times over the original context.
  const auto pair_of = [&](double rotations) {
    const auto length = static_cast<double>(config.original_max_position_embeddings);
    return rotary_dim * std::log(length / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(config.theta));
  };
  double low = pair_of(config.beta_fast);
  double high = pair_of(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rotary_dim - 1.0);
  if (low == high) high += 0.001;
  return {static_cast<float>(low), static_cast<float>(high - low)};
}

double YarnAttentionScaling(const RopeConfig& config) {
  if (config.attention_factor) return *config.attention_factor;
  if (config.mscale != 0 && config.mscale_all_dim != 0) {
    return YarnMagnitude(config.factor, config.mscale) /
           YarnMagnitude(config.factor, config.mscale_all_dim);
  }
  return YarnMagnitude(config.factor, 1.0);
}

}  // namespace

double YarnMagnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

RopeFrequencies ComputeRopeFrequencies(const RopeConfig& config, std::int32_t rotary_dim) {
  CHECK(rotary_dim > 0 && rotary_dim % 2 == 0);
  RopeFrequencies result;
  const auto factor = static_cast<float>(config.factor);
  for (std::int32_t pair = 0; pair < rotary_dim / 2; ++pair) {
    const float exponent = static_cast<float>(2 * pair) / static_cast<float>(rotary_dim);
    result.inv_freq.push_back(
        1.0f / static_cast<float>(std::pow(config.theta, static_cast<double>(exponent))));
  }
  switch (config.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      for (float& inv_freq : result.inv_freq) inv_freq /= factor;
      break;
    case RopeType::kLlama3:
      for (float& inv_freq : result.inv_freq) inv_freq = Llama3Frequency(config, inv_freq);
      break;
    case RopeType::kYarn: {
      const YarnRamp ramp = MakeYarnRamp(config, rotary_dim);
      for (std::int32_t pair = 0; pair < rotary_dim / 2; ++pair) {
        float& inv_freq = result.inv_freq[static_cast<std::size_t>(pair)];
        const float keep = 1 - ramp(pair);
        inv_freq = inv_freq / factor * (1 - keep) + inv_freq * keep;
      }
      result.attention_scaling = static_cast<float>(YarnAttentionScaling(config));
      break;
    }
  }
  return result;
}

}  // namespace weft
