#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/gumbel_argmax.h"
#include "worker/engine/step_plan.h"

namespace weft {

// Whole-vocabulary sampling on the leader. A token is the argmax of logit / temperature + Gumbel
// noise over the candidates that top_k and top_p leave; the noise depends on (seed, position,
// token id) alone, so that neither batch, layout nor replay changes the draw. Ties go to the
// lowest id. Reuses its scratch: allocates nothing after the first call. One thread.
class Sampler {
 public:
  explicit Sampler(std::int32_t vocab_size);

  // The best of the ranks' candidates for one row: candidates[r * stride]. -1 when any saw a NaN.
  static std::int32_t Best(const kernels::ArgmaxResult* candidates, int num_ranks,
                           std::int64_t stride);

  // Filters, then draws. Order as in vLLM: temperature, then top_k (all logits equal to the k-th
  // are kept out past k by lowest id first), then top_p over what is left: the smallest set of the
  // most probable tokens whose probability reaches top_p. -1 when a logit is NaN.
  std::int32_t Sample(absl::Span<const float> logits, const SamplingParams& params,
                      std::int64_t position);

 private:
  std::vector<std::int32_t> order_;
  std::vector<float> probability_;
};

}  // namespace weft
