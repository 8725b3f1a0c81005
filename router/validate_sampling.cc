#include <cstdint>
#include <limits>
#include <string_view>

#include "fmt/format.h"
#include "router/validate.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// NaN is in no range.
absl::Status CheckRange(std::string_view field, float value, float min, float max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; {} to {} are allowed", field, value, min, max));
}

// `flag` names the option that sets `max`; empty when nothing does.
absl::Status CheckCount(std::string_view field, std::int64_t value, std::int64_t min,
                        std::int64_t max, std::string_view flag) {
  if (value >= min && value <= max) return absl::OkStatus();
  if (max == kMaxInt32) {
    return absl::InvalidArgumentError(
        fmt::format("{} is {}; at least {} is allowed", field, value, min));
  }
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; {} to {} are allowed ({})", field, value, min, max, flag));
}

absl::Status CheckSize(std::string_view what, std::int64_t size, std::int64_t max,
                       std::string_view flag) {
  if (size <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} {}; at most {} are allowed ({})", size, what, max, flag));
}

absl::Status ValidateDistribution(const v1::SamplingParams& sampling) {
  if (const float t = sampling.temperature();
      sampling.has_temperature() && t != 0 && !(t >= kMinTemperature && t <= kMaxTemperature)) {
    return absl::InvalidArgumentError(
        fmt::format("temperature is {}; 0 (greedy) and {} to {} are allowed", t, kMinTemperature,
                    kMaxTemperature));
  }
  if (const float p = sampling.top_p(); sampling.has_top_p() && !(p > 0 && p <= 1)) {
    return absl::InvalidArgumentError(
        fmt::format("top_p is {}; values above 0 and up to 1 are allowed", p));
  }
  if (sampling.top_k() < -1) {
    return absl::InvalidArgumentError(fmt::format(
        "top_k is {}; -1 and 0 (all tokens) and positive values are allowed", sampling.top_k()));
  }
  if (const float p = sampling.repetition_penalty();
      sampling.has_repetition_penalty() && !(p > 0 && p <= 10)) {
    return absl::InvalidArgumentError(
        fmt::format("repetition_penalty is {}; values above 0 and up to 10 are allowed", p));
  }
  RETURN_IF_ERROR(CheckRange("min_p", sampling.min_p(), 0, 1));
  RETURN_IF_ERROR(CheckRange("presence_penalty", sampling.presence_penalty(), -2, 2));
  return CheckRange("frequency_penalty", sampling.frequency_penalty(), -2, 2);
}

absl::Status ValidateTokenRules(const v1::SamplingParams& sampling, const RequestLimits& limits) {
  RETURN_IF_ERROR(CheckSize("stop_token_ids", sampling.stop_token_ids_size(),
                            limits.max_stop_token_ids, "--max-stop-token-ids"));
  RETURN_IF_ERROR(CheckSize("logit_bias entries", sampling.logit_bias_size(), limits.max_logit_bias,
                            "--max-logit-bias"));
  for (const auto& [id, bias] : sampling.logit_bias()) {
    RETURN_IF_ERROR(CheckRange(fmt::format("logit_bias[{}]", id), bias, -100, 100));
  }
  RETURN_IF_ERROR(CheckSize("bad_words and bad_words_token_ids",
                            sampling.bad_words_size() + sampling.bad_words_token_ids_size(),
                            limits.max_bad_words, "--max-bad-words"));
  for (int i = 0; i < sampling.bad_words_token_ids_size(); ++i) {
    RETURN_IF_ERROR(CheckCount(fmt::format("the length of bad_words_token_ids[{}]", i),
                               sampling.bad_words_token_ids(i).ids_size(), 1,
                               limits.max_bad_word_tokens, "--max-bad-word-tokens"));
  }
  return absl::OkStatus();
}

absl::Status ValidateStrings(std::string_view field,
                             const google::protobuf::RepeatedPtrField<std::string>& strings,
                             const RequestLimits& limits) {
  if (!strings.empty() && !limits.text) {
    return absl::InvalidArgumentError(fmt::format(
        "{} is text; this router runs with --skip-tokenizer-init and knows tokens only", field));
  }
  for (int i = 0; i < strings.size(); ++i) {
    RETURN_IF_ERROR(CheckCount(fmt::format("the length of {}[{}]", field, i),
                               static_cast<std::int64_t>(strings[i].size()), 1,
                               limits.max_stop_string_bytes, "--max-stop-string-bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSampling(const v1::SamplingParams& sampling, const RequestLimits& limits) {
  const std::int32_t max_tokens =
      sampling.has_max_tokens() ? sampling.max_tokens() : kDefaultMaxTokens;
  RETURN_IF_ERROR(CheckCount("max_tokens", max_tokens, 1, kMaxInt32, ""));
  RETURN_IF_ERROR(CheckCount("min_tokens", sampling.min_tokens(), 0, kMaxInt32, ""));
  if (sampling.min_tokens() > max_tokens) {
    return absl::InvalidArgumentError(
        fmt::format("min_tokens is {}; at most max_tokens, {}, is "
                    "allowed",
                    sampling.min_tokens(), max_tokens));
  }
  if (sampling.has_n()) RETURN_IF_ERROR(CheckCount("n", sampling.n(), 1, limits.max_n, "--max-n"));
  RETURN_IF_ERROR(
      CheckCount("logprobs", sampling.logprobs(), 0, limits.max_logprobs, "--max-logprobs"));
  RETURN_IF_ERROR(CheckCount("prompt_logprobs", sampling.prompt_logprobs(), 0, limits.max_logprobs,
                             "--max-logprobs"));
  RETURN_IF_ERROR(ValidateDistribution(sampling));
  RETURN_IF_ERROR(ValidateTokenRules(sampling, limits));
  RETURN_IF_ERROR(CheckSize("stop strings", sampling.stop_size(), limits.max_stop_strings,
                            "--max-stop-strings"));
  RETURN_IF_ERROR(ValidateStrings("stop", sampling.stop(), limits));
  return ValidateStrings("bad_words", sampling.bad_words(), limits);
}

}  // namespace weft
