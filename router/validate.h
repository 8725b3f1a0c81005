#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// What a request may ask for, whatever group serves it.
struct RequestLimits {
  std::string served_model_name;
  bool text = true;                                        // false with --skip-tokenizer-init
  std::int64_t max_prompt_bytes = std::int64_t{16} << 20;  // of a chat: all its messages together
  std::int64_t max_prompt_tokens = std::int64_t{2} << 20;  // of token_ids; of `resume`, too
  std::int64_t max_chat_messages = 4096;
  std::int64_t max_n = 128;
  std::int64_t max_stop_strings = 16;
  std::int64_t max_stop_string_bytes = 1024;  // also of a bad word
  std::int64_t max_stop_token_ids = 128;
  std::int64_t max_bad_words = 128;  // bad_words and bad_words_token_ids together
  std::int64_t max_bad_word_tokens = 64;
  std::int64_t max_logit_bias = 1024;
  std::int64_t max_logprobs = 20;
  std::int64_t max_detokenize_tokens = std::int64_t{1} << 20;
};

// A request id has at most so many bytes: it travels with every message of the stream.
inline constexpr std::size_t kMaxRequestIdBytes = 128;
inline constexpr std::size_t kMaxCacheSaltBytes = 256;
// Temperatures between 0 and this one would only lose the noise in rounding.
inline constexpr float kMinTemperature = 1e-5F;
inline constexpr float kMaxTemperature = 1000.0F;
// What a request that says nothing gets.
inline constexpr std::int32_t kDefaultMaxTokens = 16;

// Judges what can be judged before the prompt is tokenized. INVALID_ARGUMENT says what was seen and
// what is allowed.
absl::Status ValidateRequest(const v1::GenerateRequest& request, const RequestLimits& limits);
// Its parts.
absl::Status ValidateText(std::string_view text, const RequestLimits& limits);
absl::Status ValidateChat(const v1::Chat& chat, const RequestLimits& limits);
absl::Status ValidateSampling(const v1::SamplingParams& sampling, const RequestLimits& limits);

// INVALID_ARGUMENT, naming `field` and the position, for an id outside the vocabulary.
absl::Status ValidateTokenRange(absl::Span<const std::int32_t> ids, std::int32_t vocab_size,
                                std::string_view field);
// INVALID_ARGUMENT for an empty prompt and for any token id outside the vocabulary.
absl::Status ValidateTokens(absl::Span<const std::int32_t> prompt,
                            absl::Span<const std::int32_t> resume,
                            const v1::SamplingParams& sampling, std::int32_t vocab_size);

// INVALID_ARGUMENT for a prompt, with what was produced already, that leaves no room for a token
// within `max_model_len`.
absl::Status ValidatePromptLength(std::int64_t prompt_tokens, std::int64_t max_model_len);

}  // namespace weft
