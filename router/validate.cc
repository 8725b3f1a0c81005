#include "router/validate.h"

#include <cmath>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

absl::Status ValidateSampling(const v1::SamplingParams& sampling, const RequestLimits& limits) {
  if (sampling.has_max_tokens() && sampling.max_tokens() < 1) {
    return absl::InvalidArgumentError(
        fmt::format("max_tokens is {}; at least 1 is allowed", sampling.max_tokens()));
  }
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
  if (sampling.stop_token_ids_size() > limits.max_stop_token_ids) {
    return absl::InvalidArgumentError(fmt::format("{} stop_token_ids; at most {} are allowed",
                                                  sampling.stop_token_ids_size(),
                                                  limits.max_stop_token_ids));
  }
  return absl::OkStatus();
}

absl::Status ValidatePrompt(const v1::GenerateRequest& request, const RequestLimits& limits) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      if (!limits.text_prompts) {
        return absl::InvalidArgumentError(
            "the prompt is text; this router runs with --skip-tokenizer-init and takes token_ids");
      }
      if (request.text().empty()) {
        return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
      }
      if (static_cast<std::int64_t>(request.text().size()) > limits.max_prompt_bytes) {
        return absl::InvalidArgumentError(
            fmt::format("the prompt has {} bytes; at most {} are allowed (--max-prompt-bytes)",
                        request.text().size(), limits.max_prompt_bytes));
      }
      return absl::OkStatus();
    case v1::GenerateRequest::kTokenIds:
      if (request.token_ids().ids().empty()) {
        return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
      }
      return absl::OkStatus();
    case v1::GenerateRequest::kChat:
      return absl::InvalidArgumentError(
          "chat prompts are not supported yet; set text or token_ids");
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the request has no prompt; set text or token_ids");
}

absl::Status ValidateTokenRange(absl::Span<const std::int32_t> ids, std::int32_t vocab_size,
                                std::string_view field) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(fmt::format("{}[{}] is {}; ids from 0 to {} are allowed",
                                                    field, i, ids[i], vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRequest(const v1::GenerateRequest& request, const RequestLimits& limits) {
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(fmt::format("request_id has {} bytes; at most {} are allowed",
                                                  request.request_id().size(), kMaxRequestIdBytes));
  }
  if (!request.model().empty() && request.model() != limits.served_model_name) {
    return absl::InvalidArgumentError(fmt::format("model is \"{}\"; \"{}\" is served here",
                                                  request.model(), limits.served_model_name));
  }
  RETURN_IF_ERROR(ValidatePrompt(request, limits));
  return ValidateSampling(request.sampling(), limits);
}

absl::Status ValidateTokens(absl::Span<const std::int32_t> prompt,
                            absl::Span<const std::int32_t> stop_token_ids,
                            std::int32_t vocab_size) {
  if (prompt.empty()) {
    return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
  }
  RETURN_IF_ERROR(ValidateTokenRange(prompt, vocab_size, "prompt_token_ids"));
  return ValidateTokenRange(stop_token_ids, vocab_size, "stop_token_ids");
}

absl::Status ValidatePromptLength(std::int64_t prompt_tokens, std::int64_t max_model_len) {
  if (prompt_tokens < max_model_len) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the prompt has {} tokens; at most {} are allowed (--max-model-len {} with one "
                  "token to generate)",
                  prompt_tokens, max_model_len - 1, max_model_len));
}

}  // namespace weft
