#include "worker/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "kernels/token_weight.h"
#include "server/base/check.h"

namespace weft {

Sampler::Sampler(std::int32_t vocab_size) : order_(vocab_size), weight_(vocab_size) {
  CHECK(vocab_size <= kernels::kMaxWeighedTokens);
}

std::int32_t Sampler::Best(const kernels::ArgmaxResult* candidates, int num_ranks,
                           std::int64_t stride) {
  const kernels::ArgmaxResult* best = candidates;
  for (int r = 0; r < num_ranks; ++r) {
    const kernels::ArgmaxResult& candidate = candidates[r * stride];
    if (candidate.token_id < 0) return -1;
    // Ranks hold ascending slices, so the first of equals has the lowest id.
    if (candidate.score > best->score) best = &candidate;
  }
  return best->token_id;
}

std::int32_t Sampler::KeepMinP(absl::Span<const float> logits, const SamplingParams& params,
                               std::int32_t count) {
  const auto first = order_.begin();
  const float highest = *std::max_element(logits.begin(), logits.end());
  const double least = std::log(double{params.min_p});
  const auto kept = std::partition(first, first + count, [&](std::int32_t id) {
    // Equal infinities have no difference.
    return logits[id] == highest || (double{logits[id]} - highest) / params.temperature >= least;
  });
  return static_cast<std::int32_t>(kept - first);
}

std::int32_t Sampler::KeepTopP(absl::Span<const float> logits, const SamplingParams& params,
                               std::int32_t count) {
  const auto first = order_.begin();
  float highest = logits[order_[0]];
  for (std::int32_t i = 1; i < count; ++i) highest = std::max(highest, logits[order_[i]]);
  std::uint64_t total = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::uint64_t weight =
        kernels::TokenWeight(logits[order_[i]], highest, params.temperature);
    weight_[order_[i]] = weight;
    total += weight;
  }
  const double wanted = params.top_p * static_cast<double>(total);

  // What is left out below weighs less than the rest may miss: half, to be safe from rounding.
  const double least = (static_cast<double>(total) - wanted) / count / 2;
  const auto light = std::partition(first, first + count, [&](std::int32_t id) {
    return static_cast<double>(weight_[id]) >= least;
  });
  // Halving instead of sorting: [0, low) are the heaviest and do not reach `wanted`, [0, high) do.
  std::int32_t low = 0;
  auto high = static_cast<std::int32_t>(light - first);
  std::uint64_t reached = 0;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    std::nth_element(first + low, first + middle, first + high, Higher{logits});
    std::uint64_t weight = 0;
    for (std::int32_t i = low; i < middle; ++i) weight += weight_[order_[i]];
    if (static_cast<double>(reached + weight) >= wanted) {
      high = middle;
    } else {
      reached += weight;
      low = middle;
    }
  }
  return high;
}

std::int32_t Sampler::Sample(absl::Span<const float> logits, const SamplingParams& params,
                             std::int64_t position) {
  for (float logit : logits) {
    if (std::isnan(logit)) return -1;
  }
  auto kept = static_cast<std::int32_t>(logits.size());
  std::iota(order_.begin(), order_.begin() + kept, 0);
  if (params.min_p > 0) kept = KeepMinP(logits, params, kept);
  if (params.top_k > 0 && params.top_k < kept) {
    std::nth_element(order_.begin(), order_.begin() + params.top_k - 1, order_.begin() + kept,
                     Higher{logits});
    kept = params.top_k;
  }
  if (params.top_p < 1.0f) kept = KeepTopP(logits, params, kept);

  std::int32_t best = order_[0];
  float best_score = -INFINITY;
  for (std::int32_t i = 0; i < kept; ++i) {
    const std::int32_t id = order_[i];
    const float score =
        logits[id] / params.temperature + kernels::GumbelNoise(params.seed, position, id);
    if (score > best_score || (score == best_score && id < best)) {
      best = id;
      best_score = score;
    }
  }
  return best;
}

}  // namespace weft
