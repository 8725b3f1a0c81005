#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// Prompts of random tokens.
struct RandomPrompts {
  std::int32_t num_prompts = 100;
  std::int32_t input_len = 1024;
  std::int32_t output_len = 128;
  double range_ratio = 0;  // lengths are even over [len * (1 - ratio), len * (1 + ratio)]
  std::int32_t vocab_size = 256;
  std::uint64_t seed = 0;
};

// As many requests as asked for, of token ids, with max_tokens set and ignore_eos, so that every
// one generates what it was drawn. The same for the same seed.
std::vector<v1::GenerateRequest> MakeRandomPrompts(const RandomPrompts& options);

// When requests arrive after the start, growing: the gaps are gamma-distributed with mean 1 / rate
// and shape `burstiness` (1 is a Poisson process, below 1 is burstier, above 1 more even). Without
// a rate all arrive at once: empty.
std::vector<absl::Duration> MakeArrivals(std::size_t num_requests, std::optional<double> rate,
                                         double burstiness, std::uint64_t seed);

}  // namespace weft
