#pragma once

#include <string_view>

#include "weft/v1/inference.pb.h"

namespace weft {

// As OpenAI's API and vLLM's metrics call it; empty for none.
inline std::string_view FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_ABORTED:
      return "abort";
    default:
      return "";
  }
}

}  // namespace weft
