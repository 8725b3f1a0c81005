#include "worker/engine/logits_params.h"

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// Written so that NaN is refused.
absl::Status CheckRange(std::string_view field, float seen, float min, float max) {
  if (seen >= min && seen <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; allowed is {} to {}", field, seen, min, max));
}

absl::Status CheckCount(std::string_view field, std::optional<std::int32_t> seen,
                        std::int32_t vocab_size) {
  if (!seen.has_value() || (*seen >= 0 && *seen <= vocab_size)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; allowed is 0 to {}", field, *seen, vocab_size));
}

// Before the first min_tokens there would be nothing to choose from.
absl::Status CheckSomethingIsAllowed(const LogitsParams& params) {
  if (params.min_tokens == 0 || params.allowed_token_ids.empty()) return absl::OkStatus();
  const auto& ending = params.ending_tokens;
  for (std::int32_t id : params.allowed_token_ids) {
    if (std::find(ending.begin(), ending.end(), id) == ending.end()) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(fmt::format(
      "allowed_token_ids has only tokens that end the output; min_tokens is {}: one more is needed",
      params.min_tokens));
}

}  // namespace

absl::Status ValidateTokens(std::string_view what, const std::vector<std::int32_t>& token_ids,
                            std::int32_t vocab_size) {
  for (std::size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(
          fmt::format("{}[{}] is {}; allowed is 0 to {}", what, i, token_ids[i], vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateLogits(const LogitsParams& params, std::int32_t vocab_size) {
  RETURN_IF_ERROR(CheckRange("presence_penalty", params.presence_penalty, -2, 2));
  RETURN_IF_ERROR(CheckRange("frequency_penalty", params.frequency_penalty, -2, 2));
  if (!(params.repetition_penalty > 0 && params.repetition_penalty <= 10)) {
    return absl::InvalidArgumentError(fmt::format(
        "repetition_penalty is {}; allowed is above 0 and at most 10", params.repetition_penalty));
  }
  if (params.min_tokens < 0) {
    return absl::InvalidArgumentError(
        fmt::format("min_tokens is {}; allowed is 0 and above", params.min_tokens));
  }
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          fmt::format("logit_bias is for token {}; allowed is 0 to {}", id, vocab_size - 1));
    }
    RETURN_IF_ERROR(CheckRange(fmt::format("logit_bias of token {}", id), bias, -100, 100));
  }
  RETURN_IF_ERROR(ValidateTokens("allowed_token_ids", params.allowed_token_ids, vocab_size));
  for (std::size_t i = 0; i < params.bad_words.size(); ++i) {
    const std::string what = fmt::format("bad_words_token_ids[{}]", i);
    if (params.bad_words[i].empty()) {
      return absl::InvalidArgumentError(
          fmt::format("{} is empty; at least one token is needed", what));
    }
    RETURN_IF_ERROR(ValidateTokens(what, params.bad_words[i], vocab_size));
  }
  RETURN_IF_ERROR(CheckCount("logprobs", params.logprobs, vocab_size));
  RETURN_IF_ERROR(CheckCount("prompt_logprobs", params.prompt_logprobs, vocab_size));
  return CheckSomethingIsAllowed(params);
}

}  // namespace weft
