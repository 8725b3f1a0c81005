#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "worker/engine/logits_params.h"

namespace weft {

// What the leader keeps of a slot's sequence to act on its LogitsParams: the executor's own record
// of the tokens, since plans are made before the latest one is known. One thread.
class LogitsProcessor {
 public:
  // The slot's sequence has no LogitsParams.
  void Clear();
  // Takes another sequence over. `token_ids` are its prompt and its output so far.
  void Start(std::shared_ptr<const LogitsParams> params, absl::Span<const std::int32_t> token_ids,
             std::int32_t num_prompt_tokens);

  // Null after Clear().
  const LogitsParams* params() const { return params_.get(); }
  // Of the prompt; with prompt_logprobs only.
  std::int32_t prompt_token(std::int64_t position) const { return prompt_[position]; }

  // Changes a row's raw logits [vocab] to those that the next token is chosen by, in vLLM's order:
  // allowed tokens, bad words, min_tokens, logit_bias, repetition, frequency and presence penalty.
  // What is excluded becomes -inf.
  void Process(absl::Span<float> logits);

  // The next output token.
  void Append(std::int32_t token_id);

 private:
  struct Count {
    bool in_prompt = false;
    std::int32_t in_output = 0;
  };

  void ApplyAllowed(absl::Span<float> logits);
  void ApplyBadWords(absl::Span<float> logits) const;
  void ApplyPenalties(absl::Span<float> logits) const;

  std::shared_ptr<const LogitsParams> params_;
  std::vector<std::int32_t> prompt_;
  std::vector<std::int32_t> output_;
  absl::flat_hash_map<std::int32_t, Count> counts_;  // with penalties only
  std::vector<float> allowed_logits_;                // scratch
};

// What log-softmax of a row's raw logits gives for `token_id`, and its `num_top` most probable
// tokens. `logsumexp` is the row's. Takes time linear in the vocabulary.
PositionLogprobs LogprobsOf(absl::Span<const float> logits, double logsumexp, std::int32_t token_id,
                            std::int32_t num_top);

}  // namespace weft
