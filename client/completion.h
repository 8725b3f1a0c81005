#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// One finished request: what its stream brought, or the error it ended with.
struct Completion {
  std::vector<std::int32_t> prompt_token_ids;
  std::vector<std::int32_t> token_ids;
  std::string text;
  v1::FinishReason finish_reason = v1::FINISH_REASON_UNSPECIFIED;
  // One for each of token_ids, and for each of prompt_token_ids but the first; empty unless asked
  // for.
  std::vector<v1::PositionLogprobs> logprobs;
  std::vector<v1::PositionLogprobs> prompt_logprobs;
  v1::Usage usage;
  absl::Status status;
  std::string error_reason;  // of google.rpc.ErrorInfo; empty without one

  // Adds one message of the stream.
  void Append(const v1::GenerateResponse& response);
};

// One line, without its end:
// {"index", "prompt_token_ids", "token_ids", "text", "finish_reason", "usage"}, with "logprobs" and
// "prompt_logprobs" ([{"token_id", "logprob", "rank", "top": [{"token_id", "logprob", "rank"}]}])
// if they were asked for, or
// {"index", "error": {"code", "reason", "message"}}.
std::string CompletionToJson(std::size_t index, const Completion& completion);

}  // namespace weft
