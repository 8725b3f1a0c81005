#include "router/validate.h"

#include <algorithm>

#include "fmt/format.h"
#include "server/base/quoted.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

absl::Status EmptyPrompt() {
  return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
}

absl::Status ValidateRequestId(std::string_view id) {
  if (id.size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(fmt::format("request_id has {} bytes; at most {} are allowed",
                                                  id.size(), kMaxRequestIdBytes));
  }
  const auto control =
      std::find_if(id.begin(), id.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; });
  if (control == id.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("request_id has the control character {:#04x}; none is allowed", *control));
}

// Ids are copied and hashed before it is known how many a group takes.
absl::Status ValidateCount(std::string_view field, std::int64_t tokens,
                           const RequestLimits& limits) {
  if (tokens <= limits.max_prompt_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} has {} tokens; at most {} are allowed (--max-prompt-tokens)", field, tokens,
                  limits.max_prompt_tokens));
}

absl::Status ValidatePrompt(const v1::GenerateRequest& request, const RequestLimits& limits) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      return ValidateText(request.text(), limits);
    case v1::GenerateRequest::kTokenIds:
      if (request.token_ids().ids().empty()) return EmptyPrompt();
      return ValidateCount("token_ids", request.token_ids().ids_size(), limits);
    case v1::GenerateRequest::kChat:
      return ValidateChat(request.chat(), limits);
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the request has no prompt; set text, token_ids or chat");
}

absl::Status ValidateResume(const v1::GenerateRequest& request, const RequestLimits& limits) {
  const v1::SamplingParams& sampling = request.sampling();
  const std::int32_t tokens = request.resume().ids_size();
  RETURN_IF_ERROR(ValidateCount("resume", tokens, limits));
  if ((tokens > 0 || request.resume_seq() > 0) && sampling.n() > 1) {
    return absl::InvalidArgumentError(
        fmt::format("a request of {} samples cannot be resumed; n of 1 can", sampling.n()));
  }
  const std::int32_t max_tokens =
      sampling.has_max_tokens() ? sampling.max_tokens() : kDefaultMaxTokens;
  if (tokens < max_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format(
      "resume has {} tokens; fewer than max_tokens, {}, are allowed", tokens, max_tokens));
}

}  // namespace

absl::Status ValidateText(std::string_view text, const RequestLimits& limits) {
  if (!limits.text) {
    return absl::InvalidArgumentError(
        "the prompt is text; this router runs with --skip-tokenizer-init and takes token_ids");
  }
  if (text.empty()) return EmptyPrompt();
  if (static_cast<std::int64_t>(text.size()) <= limits.max_prompt_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the prompt has {} bytes; at most {} are allowed (--max-prompt-bytes)",
                  text.size(), limits.max_prompt_bytes));
}

absl::Status ValidateChat(const v1::Chat& chat, const RequestLimits& limits) {
  if (!limits.text) {
    return absl::InvalidArgumentError(
        "the prompt is a chat; this router runs with --skip-tokenizer-init and takes token_ids");
  }
  if (chat.messages().empty()) {
    return absl::InvalidArgumentError("the chat has no messages; at least one is needed");
  }
  if (chat.messages_size() > limits.max_chat_messages) {
    return absl::InvalidArgumentError(
        fmt::format("the chat has {} messages; at most {} are allowed (--max-chat-messages)",
                    chat.messages_size(), limits.max_chat_messages));
  }
  std::int64_t bytes = 0;
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    if (message.role() < v1::ROLE_SYSTEM || message.role() > v1::ROLE_ASSISTANT) {
      return absl::InvalidArgumentError(
          fmt::format("messages[{}].role is {}; 1 (system), 2 (user) and 3 (assistant) are allowed",
                      i, static_cast<int>(message.role())));
    }
    bytes += static_cast<std::int64_t>(message.content().size());
  }
  if (bytes <= limits.max_prompt_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the chat has {} bytes; at most {} are allowed (--max-prompt-bytes)", bytes,
                  limits.max_prompt_bytes));
}

absl::Status ValidateCacheSalt(std::string_view salt) {
  if (salt.size() <= kMaxCacheSaltBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("cache_salt has {} bytes; at most {} are allowed",
                                                salt.size(), kMaxCacheSaltBytes));
}

absl::Status ValidateRequest(const v1::GenerateRequest& request, const RequestLimits& limits) {
  RETURN_IF_ERROR(ValidateRequestId(request.request_id()));
  RETURN_IF_ERROR(ValidateCacheSalt(request.cache_salt()));
  if (!request.model().empty() && request.model() != limits.served_model_name) {
    // gRPC drops the message of a status that has grown too large.
    return absl::InvalidArgumentError(fmt::format(
        "model is {}; \"{}\" is served here", Quoted(request.model()), limits.served_model_name));
  }
  RETURN_IF_ERROR(ValidatePrompt(request, limits));
  RETURN_IF_ERROR(ValidateSampling(request.sampling(), limits));
  return ValidateResume(request, limits);
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

absl::Status ValidateTokens(absl::Span<const std::int32_t> prompt,
                            absl::Span<const std::int32_t> resume,
                            const v1::SamplingParams& sampling, std::int32_t vocab_size) {
  if (prompt.empty()) return EmptyPrompt();
  RETURN_IF_ERROR(ValidateTokenRange(prompt, vocab_size, "prompt_token_ids"));
  RETURN_IF_ERROR(ValidateTokenRange(resume, vocab_size, "resume"));
  RETURN_IF_ERROR(ValidateTokenRange(sampling.stop_token_ids(), vocab_size, "stop_token_ids"));
  if (sampling.allowed_token_ids_size() > vocab_size) {
    return absl::InvalidArgumentError(
        fmt::format("{} allowed_token_ids; at most the vocabulary, {}, are allowed",
                    sampling.allowed_token_ids_size(), vocab_size));
  }
  RETURN_IF_ERROR(
      ValidateTokenRange(sampling.allowed_token_ids(), vocab_size, "allowed_token_ids"));
  for (int i = 0; i < sampling.bad_words_token_ids_size(); ++i) {
    RETURN_IF_ERROR(ValidateTokenRange(sampling.bad_words_token_ids(i).ids(), vocab_size,
                                       fmt::format("bad_words_token_ids[{}]", i)));
  }
  for (const auto& [id, bias] : sampling.logit_bias()) {
    if (id >= 0 && id < vocab_size) continue;
    return absl::InvalidArgumentError(
        fmt::format("logit_bias has id {}; ids from 0 to {} are allowed", id, vocab_size - 1));
  }
  return absl::OkStatus();
}

absl::Status ValidatePromptLength(std::int64_t prompt_tokens, std::int64_t max_model_len) {
  if (prompt_tokens < max_model_len) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the prompt has {} tokens; at most {} are allowed (--max-model-len {} with one "
                  "token to generate)",
                  prompt_tokens, max_model_len - 1, max_model_len));
}

}  // namespace weft
