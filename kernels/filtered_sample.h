#pragma once

#include <cstdint>

namespace weft::kernels {

// What a row that filters asks for, as SamplingParams has it.
struct FilteredRow {
  std::uint64_t seed;
  std::int64_t position;  // that the token will take
  double log_min_p;       // -infinity is off
  float temperature;      // > 0
  float top_p;            // 1 is off
  std::int32_t top_k;     // 0 is off
};

struct FilteredToken {
  std::int32_t token_id;  // -1 if a logit is NaN
  float logit;
};

// Sampling over what min_p, top_k and top_p leave of the whole vocabulary, on a device:
// DeviceStream::FilteredSample(). The token is Sampler's (worker/model/sampler.h), which is this
// op's CPU side.
struct FilteredSampleParams {
  // [num_slices, num_rows, logits_stride]; slice s of a row has the tokens of
  // [s * vocab_size / num_slices, (s + 1) * vocab_size / num_slices).
  const float* logits;
  const FilteredRow* rows;  // [num_rows]
  FilteredToken* out;       // [num_rows]
  std::int64_t logits_stride;
  std::int32_t num_slices;
  std::int32_t num_rows;
  std::int32_t vocab_size;  // > 0, at most kMaxWeighedTokens
};

}  // namespace weft::kernels
