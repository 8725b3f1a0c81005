#include "client/completion.h"

#include "nlohmann/json.hpp"
#include "server/finish_reason.h"

namespace weft {

void Completion::Append(const v1::GenerateResponse& response) {
  prompt_token_ids.insert(prompt_token_ids.end(), response.prompt_token_ids().begin(),
                          response.prompt_token_ids().end());
  token_ids.insert(token_ids.end(), response.token_ids().begin(), response.token_ids().end());
  logprobs.insert(logprobs.end(), response.logprobs().begin(), response.logprobs().end());
  prompt_logprobs.insert(prompt_logprobs.end(), response.prompt_logprobs().begin(),
                         response.prompt_logprobs().end());
  text += response.text();
  usage = response.usage();
  if (response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
    finish_reason = response.finish_reason();
  }
}

namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const v1::TokenLogprob& token) {
  return {{"token_id", token.token_id()}, {"logprob", token.logprob()}, {"rank", token.rank()}};
}

Json ToJson(const std::vector<v1::PositionLogprobs>& positions) {
  Json list = Json::array();
  for (const v1::PositionLogprobs& position : positions) {
    Json& item = list.emplace_back(ToJson(position.token()));
    item["top"] = Json::array();
    for (const v1::TokenLogprob& token : position.top()) item["top"].push_back(ToJson(token));
  }
  return list;
}

}  // namespace

std::string CompletionToJson(std::size_t index, const Completion& completion) {
  Json line;
  line["index"] = index;
  if (completion.status.ok()) {
    line["prompt_token_ids"] = completion.prompt_token_ids;
    line["token_ids"] = completion.token_ids;
    line["text"] = completion.text;
    if (!completion.logprobs.empty()) line["logprobs"] = ToJson(completion.logprobs);
    if (!completion.prompt_logprobs.empty()) {
      line["prompt_logprobs"] = ToJson(completion.prompt_logprobs);
    }
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
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace weft
