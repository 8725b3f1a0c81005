#include "worker/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace weft {

Sampler::Sampler(std::int32_t vocab_size) : order_(vocab_size), probability_(vocab_size) {}

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

std::int32_t Sampler::Sample(absl::Span<const float> logits, const SamplingParams& params,
                             std::int64_t position) {
  const auto vocab_size = static_cast<std::int32_t>(logits.size());
  for (float logit : logits) {
    if (std::isnan(logit)) return -1;
  }
  const bool top_k_on = params.top_k > 0 && params.top_k < vocab_size;
  std::iota(order_.begin(), order_.begin() + vocab_size, 0);
  const auto higher = [&](std::int32_t a, std::int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };

  std::int32_t kept = vocab_size;
  if (top_k_on) {
    kept = params.top_k;
    std::nth_element(order_.begin(), order_.begin() + kept - 1, order_.begin() + vocab_size,
                     higher);
  }
  if (params.top_p < 1.0f) {
    std::sort(order_.begin(), order_.begin() + kept, higher);
    const double highest = logits[order_[0]];
    double total = 0;
    for (std::int32_t i = 0; i < kept; ++i) {
      const double p = std::exp((logits[order_[i]] - highest) / params.temperature);
      probability_[i] = static_cast<float>(p);
      total += p;
    }
    double reached = 0;
    for (std::int32_t i = 0; i < kept; ++i) {
      reached += probability_[i];
      if (reached >= params.top_p * total) kept = i + 1;
    }
  }

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
