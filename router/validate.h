#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// What a request may ask for, whatever group serves it.
struct RequestLimits {
  std::string served_model_name;
  bool text_prompts = true;  // false with --skip-tokenizer-init
  std::int64_t max_prompt_bytes = std::int64_t{16} << 20;
  std::int64_t max_stop_token_ids = 128;
};

// The bounds of a group's model.
struct ModelBounds {
  std::int32_t vocab_size = 0;
  std::int64_t max_model_len = 0;
};

// A request id has at most so many bytes: it travels with every message of the stream.
inline constexpr std::size_t kMaxRequestIdBytes = 128;
// Temperatures between 0 and this one would only lose the noise in rounding.
inline constexpr float kMinTemperature = 1e-5F;
inline constexpr float kMaxTemperature = 1000.0F;

// Judges what can be judged before the prompt is tokenized. INVALID_ARGUMENT says what was seen and
// what is allowed.
absl::Status ValidateRequest(const v1::GenerateRequest& request, const RequestLimits& limits);

// INVALID_ARGUMENT for an empty prompt and for prompt or stop tokens outside the vocabulary.
absl::Status ValidateTokens(absl::Span<const std::int32_t> prompt,
                            absl::Span<const std::int32_t> stop_token_ids, std::int32_t vocab_size);

// INVALID_ARGUMENT for a prompt that leaves no room for a token within `max_model_len`.
absl::Status ValidatePromptLength(std::int64_t prompt_tokens, std::int64_t max_model_len);

}  // namespace weft
