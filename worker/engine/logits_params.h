#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace weft {

// What a request asks of its rows' logits beyond SamplingParams. Only the leader knows it: the
// followers bring such rows whole. Immutable once handed over: the engine and the executor share
// one.
struct LogitsParams {
  float presence_penalty = 0;               // [-2, 2]; of tokens in the output
  float frequency_penalty = 0;              // [-2, 2]; for each time a token is in the output
  float repetition_penalty = 1;             // (0, 10]; of tokens in the prompt or the output
  std::int32_t min_tokens = 0;              // output tokens, resumed ones included
  std::vector<std::int32_t> ending_tokens;  // that min_tokens holds back
  std::vector<std::pair<std::int32_t, float>> logit_bias;  // token id, [-100, 100]; ids differ
  std::vector<std::int32_t> allowed_token_ids;             // empty: all
  std::vector<std::vector<std::int32_t>>
      bad_words;                         // sequences that are never completed; not empty
  std::optional<std::int32_t> logprobs;  // of output tokens, with this many most probable ones
  std::optional<std::int32_t> prompt_logprobs;  // likewise, of the prompt but its first

  bool HasPenalties() const {
    return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1;
  }
  // Neither changes logits nor tells them.
  bool IsNeutral() const {
    return !ChangesLogits() && !logprobs.has_value() && !prompt_logprobs.has_value();
  }
  bool ChangesLogits() const {
    return HasPenalties() || min_tokens != 0 || !logit_bias.empty() || !allowed_token_ids.empty() ||
           !bad_words.empty();
  }
};

// INVALID_ARGUMENT, naming the field, what was seen and what is allowed.
absl::Status ValidateLogits(const LogitsParams& params, std::int32_t vocab_size);
// Likewise, for ids outside the vocabulary: what[index].
absl::Status ValidateTokens(std::string_view what, const std::vector<std::int32_t>& token_ids,
                            std::int32_t vocab_size);

struct TokenLogprob {
  std::int32_t token_id = 0;
  float logprob = 0;      // natural, of the model's own distribution
  std::int32_t rank = 0;  // 1 for the most probable; of equal ones the lowest id comes first
};

// Of one position: the token that stands there, and the most probable ones, by rank.
struct PositionLogprobs {
  TokenLogprob token;
  std::vector<TokenLogprob> top;
};

}  // namespace weft
