#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

namespace weft::kernels {

// Standard Gumbel noise, -log(-log(u)), a pure function of its arguments: u in (0, 1) is
// (word + 1/2) / 2^32, where the word is number token_id % 4 of the four that Philox4x32-10 gives
// for key = seed and counter = (position, token_id / 4). The same bits on every rank, batch, run
// and CPU target; `position` is the global position the sampled token will take.
float GumbelNoise(std::uint64_t seed, std::int64_t position, std::int32_t token_id);

// The best candidate of a slice of the vocabulary. Trivially copyable: it travels as bytes.
struct ArgmaxResult {
  float score;            // logit / temperature + noise, or the logit when greedy
  float logsumexp;        // of the slice's raw logits (temperature not applied)
  std::int32_t token_id;  // lowest id among equal scores
  // If a logit of the row is NaN: token_id = -1, score = +inf (so that the slice wins and is seen),
  // logsumexp NaN.
};

// Greedy and plain temperature sampling over this rank's slice of the vocabulary. The whole
// vocabulary's token is the best of the ranks' results (highest score, then lowest id).
struct GumbelArgmaxParams {
  const float* logits;           // [num_rows, logits_stride], the first vocab_size of a row count
  const float* temperature;      // [num_rows]; 0 is greedy
  const std::uint64_t* seed;     // [num_rows]
  const std::int64_t* position;  // [num_rows]
  ArgmaxResult* out;             // [num_rows]
  std::int64_t logits_stride;
  std::int32_t num_rows;
  std::int32_t vocab_size;  // > 0
  std::int32_t first_token_id;
};

absl::Status GumbelArgmax(const GumbelArgmaxParams& params, Stream& stream);

}  // namespace weft::kernels
