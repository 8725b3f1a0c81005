#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/gumbel_argmax.h"
#include "worker/engine/step_plan.h"

namespace weft {

// Whole-vocabulary sampling on the leader's CPU; devices have kernels/filtered_sample.h, with the
// same tokens. A token is the argmax of logit / temperature + Gumbel
// noise over the candidates that top_k and top_p leave; the noise depends on (seed, position,
// token id) alone, so that neither batch, layout nor replay changes the draw. Ties go to the
// lowest id. Reuses its scratch: allocates nothing after the first call. One thread.
class Sampler {
 public:
  explicit Sampler(std::int32_t vocab_size);

  // The best of the ranks' candidates for one row: candidates[r * stride]. -1 when any saw a NaN.
  static std::int32_t Best(const kernels::ArgmaxResult* candidates, int num_ranks,
                           std::int64_t stride);

  // Filters, then draws. Order as in vLLM: temperature, min_p, then top_k (of logits equal to the
  // k-th the lowest ids stay), then top_p over what is left: the smallest set of the most probable
  // tokens whose probability reaches top_p. -1 when a logit is NaN. Takes time linear in the
  // vocabulary. temperature > 0.
  std::int32_t Sample(absl::Span<const float> logits, const SamplingParams& params,
                      std::int64_t position);

 private:
  // The order of candidates: ties are settled by id.
  struct Higher {
    absl::Span<const float> logits;
    bool operator()(std::int32_t a, std::int32_t b) const {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    }
  };

  // Moves what min_p keeps of order_[0, count) to the front; how many those are.
  std::int32_t KeepMinP(absl::Span<const float> logits, const SamplingParams& params,
                        std::int32_t count);
  // Moves what top_p keeps of order_[0, count) to the front; how many those are.
  std::int32_t KeepTopP(absl::Span<const float> logits, const SamplingParams& params,
                        std::int32_t count);

  std::vector<std::int32_t> order_;    // candidates, the kept ones first
  std::vector<std::uint64_t> weight_;  // by id: TokenWeight()
};

}  // namespace weft
