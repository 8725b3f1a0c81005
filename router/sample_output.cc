#include "router/sample_output.h"

#include <algorithm>
#include <string>
#include <utility>

namespace weft {

SampleOutput::SampleOutput(const Tokenizer* tokenizer, const v1::SamplingParams& sampling,
                           std::int32_t index, std::int32_t prompt_tokens)
    : index_(index),
      prompt_tokens_(prompt_tokens),
      include_stop_(sampling.include_stop_str_in_output()) {
  if (tokenizer == nullptr) return;
  text_.emplace(*tokenizer,
                OutputTextOptions{.stop = {sampling.stop().begin(), sampling.stop().end()},
                                  .include_stop_str_in_output = include_stop_,
                                  .skip_special_tokens = !sampling.has_skip_special_tokens() ||
                                                         sampling.skip_special_tokens(),
                                  .min_tokens = sampling.min_tokens()});
}

bool SampleOutput::Resume(absl::Span<const std::int32_t> ids, v1::GenerateResponse& message) {
  std::string sent_already;
  for (const std::int32_t id : ids) {
    ++completion_tokens_;
    const std::string* stop = text_ ? text_->Append(id, sent_already) : nullptr;
    if (stop == nullptr) continue;
    message.set_index(index_);
    Finish(v1::FINISH_REASON_STOP, message);
    message.set_stop(*stop);
    SetUsage(message);
    return true;
  }
  return false;
}

bool SampleOutput::Read(v1::WorkerGenerateResponse& response, v1::GenerateResponse& message) {
  if (finished_) return false;
  // A replay finds what the attempts before it have left; that was never the client's prefix.
  if (!started_) cached_tokens_ = std::max(cached_tokens_, response.cached_tokens());
  started_ |= !response.token_ids().empty();
  for (v1::PositionLogprobs& position : *response.mutable_prompt_logprobs()) {
    *prompt_logprobs_.Add() = std::move(position);
  }
  const v1::FinishReason finish = response.finish_reason();
  if (response.token_ids().empty() && finish == v1::FINISH_REASON_UNSPECIFIED) return false;

  message.set_index(index_);
  message.mutable_token_ids()->Swap(response.mutable_token_ids());
  message.mutable_logprobs()->Swap(response.mutable_logprobs());
  message.mutable_prompt_logprobs()->Swap(&prompt_logprobs_);
  if (finish == v1::FINISH_REASON_STOP && !message.token_ids().empty()) {
    const std::int32_t last = *message.token_ids().rbegin();
    response.ended_by_eos() ? message.set_eos_token_id(last) : message.set_stop_token_id(last);
  }
  AddText(message);
  completion_tokens_ += message.token_ids_size();
  if (!finished_ && finish != v1::FINISH_REASON_UNSPECIFIED) Finish(finish, message);
  SetUsage(message);
  return true;
}

void SampleOutput::Abort(v1::GenerateResponse& message) {
  message.set_index(index_);
  Finish(v1::FINISH_REASON_ABORTED, message);
  SetUsage(message);
}

void SampleOutput::AddText(v1::GenerateResponse& message) {
  if (!text_) return;
  const bool ended_by_token = message.stopped_by_case() != v1::GenerateResponse::STOPPED_BY_NOT_SET;
  for (int i = 0; i < message.token_ids_size(); ++i) {
    if (ended_by_token && i + 1 == message.token_ids_size() && !include_stop_) {
      text_->SkipToken();  // as with a stop string, the text is what stands before it
      return;
    }
    const std::string* stop = text_->Append(message.token_ids(i), *message.mutable_text());
    if (stop == nullptr) continue;
    message.mutable_token_ids()->Truncate(i + 1);
    if (message.logprobs_size() > i + 1) {
      message.mutable_logprobs()->DeleteSubrange(i + 1, message.logprobs_size() - (i + 1));
    }
    message.set_stop(*stop);
    message.set_finish_reason(v1::FINISH_REASON_STOP);
    finished_ = true;
    return;
  }
}

void SampleOutput::Finish(v1::FinishReason reason, v1::GenerateResponse& message) {
  finished_ = true;
  message.set_finish_reason(reason);
  if (text_) text_->Flush(*message.mutable_text());
}

void SampleOutput::SetUsage(v1::GenerateResponse& message) const {
  message.mutable_usage()->set_prompt_tokens(prompt_tokens_);
  message.mutable_usage()->set_completion_tokens(completion_tokens_);
  message.mutable_usage()->set_cached_tokens(cached_tokens_);
}

}  // namespace weft
