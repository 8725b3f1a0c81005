#include "client/bench_load.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

namespace weft {
namespace {

std::int32_t DrawLength(std::int32_t length, double ratio, std::mt19937_64& random) {
  const auto low = static_cast<std::int32_t>(std::floor(length * (1 - ratio)));
  const auto high = static_cast<std::int32_t>(std::ceil(length * (1 + ratio)));
  return std::uniform_int_distribution<std::int32_t>(std::max(1, low), std::max(1, high))(random);
}

}  // namespace

std::vector<v1::GenerateRequest> MakeRandomPrompts(const RandomPrompts& options) {
  std::mt19937_64 random(options.seed);
  std::uniform_int_distribution<std::int32_t> token(0, options.vocab_size - 1);
  std::vector<v1::GenerateRequest> requests;
  for (std::int32_t i = 0; i < options.num_prompts; ++i) {
    v1::GenerateRequest request;
    const std::int32_t input_len = DrawLength(options.input_len, options.range_ratio, random);
    for (std::int32_t t = 0; t < input_len; ++t) {
      request.mutable_token_ids()->add_ids(token(random));
    }
    v1::SamplingParams& sampling = *request.mutable_sampling();
    sampling.set_max_tokens(DrawLength(options.output_len, options.range_ratio, random));
    sampling.set_ignore_eos(true);
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<absl::Duration> MakeArrivals(std::size_t num_requests, std::optional<double> rate,
                                         double burstiness, std::uint64_t seed) {
  std::vector<absl::Duration> arrivals;
  if (!rate) return arrivals;
  std::mt19937_64 random(seed);
  std::gamma_distribution<double> gap(burstiness, 1 / (*rate * burstiness));
  absl::Duration at;
  for (std::size_t i = 0; i < num_requests; ++i) {
    arrivals.push_back(at);
    at += absl::Seconds(gap(random));
  }
  return arrivals;
}

}  // namespace weft
