#include "client/completion.h"

#include "nlohmann/json.hpp"
#include "server/finish_reason.h"

namespace weft {

void Completion::Append(const v1::GenerateResponse& response) {
  prompt_token_ids.insert(prompt_token_ids.end(), response.prompt_token_ids().begin(),
                          response.prompt_token_ids().end());
  token_ids.insert(token_ids.end(), response.token_ids().begin(), response.token_ids().end());
  text += response.text();
  usage = response.usage();
  if (response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
    finish_reason = response.finish_reason();
  }
}

std::string CompletionToJson(std::size_t index, const Completion& completion) {
  nlohmann::ordered_json line;
  line["index"] = index;
  if (completion.status.ok()) {
    line["prompt_token_ids"] = completion.prompt_token_ids;
    line["token_ids"] = completion.token_ids;
    line["text"] = completion.text;
    line["finish_reason"] = FinishReasonName(completion.finish_reason);
    const v1::Usage& usage = completion.usage;
    line["usage"] = {{"prompt_tokens", usage.prompt_tokens()},
                     {"completion_tokens", usage.completion_tokens()},
                     {"total_tokens", usage.prompt_tokens() + usage.completion_tokens()}};
  } else {
    line["error"] = {{"code", absl::StatusCodeToString(completion.status.code())},
                     {"reason", completion.error_reason},
                     {"message", std::string(completion.status.message())}};
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace weft
