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
  v1::Usage usage;
  absl::Status status;
  std::string error_reason;  // of google.rpc.ErrorInfo; empty without one

  // Adds one message of the stream.
  void Append(const v1::GenerateResponse& response);
};

// One line, without its end:
// {"index", "prompt_token_ids", "token_ids", "text", "finish_reason", "usage"}, or
// {"index", "error": {"code", "reason", "message"}}.
std::string CompletionToJson(std::size_t index, const Completion& completion);

}  // namespace weft
