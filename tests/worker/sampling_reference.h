#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "worker/engine/engine.h"

namespace weft {

// What a request should get, computed plainly, in double, over dense arrays: the semantics of
// vLLM's V1 sampler, and Weft's own noise.
class SamplingReference {
 public:
  // `logits` are the model's own after prompt and `output` [vocab]; `eos_token_ids` the model's.
  SamplingReference(const EngineRequest& request, absl::Span<const double> logits,
                    absl::Span<const std::int32_t> output);

  // By token: what chooses it, the highest wins; -inf where something excludes it.
  const std::vector<double>& scores() const { return scores_; }
  // The one with the highest score.
  std::int32_t Token() const;
  // By token: log-softmax of the model's own logits.
  const std::vector<double>& logprobs() const { return logprobs_; }

 private:
  void Process(const LogitsParams& params, absl::Span<const std::int32_t> prompt,
               absl::Span<const std::int32_t> output);
  void Filter(const SamplingParams& params);

  std::vector<double> scores_;
  std::vector<double> logprobs_;
};

}  // namespace weft
