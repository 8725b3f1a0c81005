#include "router/generate_call.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "router/text/bad_words.h"
#include "server/base/draw.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// What piles up before a slow reader. What belongs to the prompt comes once and is as long as the
// client asked for.
std::int64_t ResponseBytes(const v1::GenerateResponse& response) {
  constexpr std::int64_t kFixedBytes = 32;
  constexpr std::int64_t kBytesPerId = sizeof(std::int32_t);
  constexpr std::int64_t kBytesPerLogprob = 32;
  std::int64_t bytes = kFixedBytes + static_cast<std::int64_t>(response.text().size()) +
                       kBytesPerId * response.token_ids_size();
  if (response.logprobs_size() > 0) {  // every position has as many
    bytes += kBytesPerLogprob * response.logprobs_size() * (1 + response.logprobs(0).top_size());
  }
  return bytes;
}

bool MergeResponses(v1::GenerateResponse& into, v1::GenerateResponse& next) {
  if (into.index() != next.index()) return false;
  std::string text;
  text.swap(*into.mutable_text());
  text += next.text();
  next.clear_text();
  into.MergeFrom(next);  // lists grow, what else is set in `next` replaces
  into.mutable_text()->swap(text);
  return true;
}

absl::Status WithField(const absl::Status& status, std::string_view field) {
  return absl::Status(status.code(), fmt::format("{}: {}", field, std::string(status.message())));
}

}  // namespace

StreamWriterOptions<v1::GenerateResponse> ResponseStreamOptions(const GenerateContext& context) {
  // The messages of one sample merge into one, so that at most one of each waits.
  return {.max_messages = static_cast<std::size_t>(std::max<std::int64_t>(1, context.limits.max_n)),
          .max_bytes = context.max_stream_buffer_bytes,
          .size_bytes = ResponseBytes,
          .merge = MergeResponses,
          .total_buffered_bytes =
              context.metrics != nullptr ? context.metrics->stream_buffer_bytes() : nullptr};
}

// No name of a tenant has a slash.
std::string NameOf(const Tenant* tenant, std::string_view name) {
  return tenant == nullptr ? std::string(name) : fmt::format("{}/{}", tenant->name(), name);
}

absl::StatusOr<std::vector<std::int32_t>> EncodeText(const GenerateContext& context,
                                                     const std::string& text) {
  return context.tokenizer->Encode(text, /*add_special_tokens=*/false);
}

absl::StatusOr<std::vector<std::int32_t>> EncodeChat(const GenerateContext& context,
                                                     const v1::Chat& chat) {
  if (context.chat_template == nullptr) {
    return absl::InvalidArgumentError(
        "the model has no chat template; set text or token_ids instead of chat");
  }
  std::vector<ChatTurn> turns;
  for (const v1::ChatMessage& message : chat.messages()) {
    constexpr const char* kRoles[] = {"", "system", "user", "assistant"};
    turns.push_back({.role = kRoles[message.role()], .content = message.content()});
  }
  ASSIGN_OR_RETURN(const std::string text, context.chat_template->Render(turns));
  return EncodeText(context, text);
}

GenerateCall::GenerateCall(const GenerateContext& context, v1::GenerateRequest request,
                           std::chrono::system_clock::time_point deadline,
                           std::shared_ptr<Tenant> tenant, std::string traceparent,
                           std::shared_ptr<AccessRecord> record)
    : context_(context),
      tenant_(std::move(tenant)),
      traceparent_(std::move(traceparent)),
      record_(std::move(record)),
      request_(std::move(request)),
      deadline_(deadline) {}

void GenerateCall::Start(std::shared_ptr<Writer> writer) {
  writer_ = std::move(writer);
  if (absl::Status status = Admit(); !status.ok()) {
    place_ = nullptr;
    writer_->Finish(std::move(status));
    return;
  }
  if (!request_.sampling().has_seed()) request_.mutable_sampling()->set_seed(DrawUint64());
  if (request_.has_token_ids()) {
    prompt_.assign(request_.token_ids().ids().begin(), request_.token_ids().ids().end());
    request_.clear_token_ids();
    if (request_.sampling().bad_words().empty() && request_.resume().ids().empty()) {
      StartSamples();
      return;
    }
  }
  absl::Status accepted = context_.text_pool->Submit([self = shared_from_this()] {
    if (absl::Status status = self->Tokenize(); !status.ok()) {
      self->End(std::move(status));
    } else {
      self->StartSamples();
    }
  });
  if (!accepted.ok()) End(std::move(accepted));
}

absl::Status GenerateCall::Admit() {
  RETURN_IF_ERROR(ValidateRequest(request_, context_.limits));
  if (request_.request_id().empty()) {
    request_.set_request_id(fmt::format("{:016x}{:016x}", DrawUint64(), DrawUint64()));
  }
  if (record_ != nullptr) record_->SetRequestId(request_.request_id());
  key_ = NameOf(tenant_.get(), request_.request_id());
  request_.set_cache_salt(NameOf(tenant_.get(), request_.cache_salt()));
  if (tenant_ != nullptr) {
    ASSIGN_OR_RETURN(place_, tenant_->StartRequest(absl::Now(), request_.priority()));
  }
  return context_.registry->Add(key_, weak_from_this());
}

absl::Status GenerateCall::Tokenize() {
  {
    MutexLock lock(mutex_);
    if (ended_ || aborted_) return absl::OkStatus();
  }
  if (request_.has_text()) {
    ASSIGN_OR_RETURN(prompt_, EncodeText(context_, request_.text()));
  } else if (request_.has_chat()) {
    ASSIGN_OR_RETURN(prompt_, EncodeChat(context_, request_.chat()));
  }
  request_.clear_prompt();
  v1::SamplingParams& sampling = *request_.mutable_sampling();
  for (int i = 0; i < sampling.bad_words_size(); ++i) {
    auto sequences = BadWordTokens(*context_.tokenizer, sampling.bad_words(i));
    if (!sequences.ok()) return WithField(sequences.status(), fmt::format("bad_words[{}]", i));
    for (const std::vector<std::int32_t>& ids : *sequences) {
      sampling.add_bad_words_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
    }
  }
  sampling.clear_bad_words();
  return absl::OkStatus();
}

void GenerateCall::MakeSamples() {
  const v1::SamplingParams& sampling = request_.sampling();
  const auto prompt_tokens = static_cast<std::int32_t>(prompt_.size());
  const SampleCall::Options options = {
      .cluster = context_.cluster,
      .metrics = context_.metrics,
      .max_attempts = context_.max_attempts,
      .max_replays = context_.max_replays,
      .prompt = std::make_shared<PromptBlocks>(prompt_, request_.cache_salt()),
      .priority = request_.priority(),
      .tenant = tenant_ == nullptr ? "" : tenant_->name(),
      .max_tokens = sampling.max_tokens(),
      .resumed_tokens = request_.resume().ids_size(),
      .pd_min_prefill_tokens = context_.pd_min_prefill_tokens,
      .deadline = deadline_};
  for (std::int32_t i = 0; i < std::max(1, sampling.n()); ++i) {
    samples_.push_back(std::make_unique<SampleCall>(
        *this, i, options, SampleOutput(context_.tokenizer, sampling, i, prompt_tokens)));
  }
}

void GenerateCall::StartSamples() {
  if (tenant_ != nullptr) {
    const std::size_t tokens = prompt_.size() + request_.resume().ids().size();
    if (absl::Status status = tenant_->TakePrompt(static_cast<std::int64_t>(tokens), absl::Now());
        !status.ok()) {
      End(std::move(status));
      return;
    }
  }
  MakeSamples();
  if (v1::GenerateResponse message;
      samples_[0]->output().Resume(request_.resume().ids(), message)) {
    OnSampleMessage(std::move(message));
    End(absl::OkStatus());
    return;
  }
  bool aborted = false;
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    started_ = true;
    num_running_ = static_cast<std::int32_t>(samples_.size());
    aborted = aborted_;
  }
  if (aborted) CancelSamples();  // they end as soon as they start
  for (const auto& sample : samples_) {
    sample->Start(std::shared_ptr<SampleCall>(shared_from_this(), sample.get()));
  }
}

absl::StatusOr<v1::WorkerGenerateRequest> GenerateCall::MakeWorkerRequest(
    std::int32_t index, absl::Span<const std::int32_t> produced, std::int32_t vocab_size) const {
  RETURN_IF_ERROR(
      ValidateTokens(prompt_, request_.resume().ids(), request_.sampling(), vocab_size));
  v1::WorkerGenerateRequest request;
  // Each sample is a request of its own there. The number comes first and always: so no id of a
  // client makes the same name.
  request.set_request_id(fmt::format("{}:{}", index, key_));
  request.mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  *request.mutable_resume_token_ids() = request_.resume().ids();
  request.mutable_resume_token_ids()->Add(produced.begin(), produced.end());
  request.set_priority(request_.priority());
  request.set_cache_salt(request_.cache_salt());
  request.set_traceparent(traceparent_);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling = request_.sampling();
  sampling.set_seed(sampling.seed() + static_cast<std::uint64_t>(index));
  // The client has those of the prompt once it has any message.
  if (index > 0 || request_.resume_seq() > 0 || !produced.empty()) sampling.clear_prompt_logprobs();
  sampling.clear_n();
  sampling.clear_stop();
  sampling.clear_include_stop_str_in_output();
  sampling.clear_skip_special_tokens();
  return request;
}

void GenerateCall::OnSamplePlaced(const std::string& group) {
  if (record_ != nullptr) record_->OnPlaced(group);
}

void GenerateCall::OnSampleMessage(v1::GenerateResponse message) {
  message.set_request_id(request_.request_id());
  if (record_ != nullptr) record_->OnMessage(message, absl::Now());
  if (tenant_ != nullptr) tenant_->AddCompletion(message.token_ids_size(), absl::Now());
  bool open = false;
  {
    MutexLock lock(write_mutex_);
    if (!std::exchange(wrote_first_, true) && request_.resume_seq() == 0) {
      message.mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
    }
    open = writer_->Write(std::move(message));
  }
  if (!open) End(absl::CancelledError("the client does not read"));
}

void GenerateCall::OnSampleEnd(std::int32_t index, absl::Status status) {
  bool aborted = false;
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    aborted = aborted_;
  }
  if (SampleOutput& output = samples_[index]->output(); aborted && !output.finished()) {
    v1::GenerateResponse message;
    output.Abort(message);
    OnSampleMessage(std::move(message));
    status = absl::OkStatus();
  }
  bool last = false;
  {
    MutexLock lock(mutex_);
    last = --num_running_ == 0;
  }
  if (!status.ok() || last) End(std::move(status));
}

void GenerateCall::Abort() {
  bool started = false;
  {
    MutexLock lock(mutex_);
    if (ended_ || aborted_) return;
    aborted_ = true;
    started = started_;
  }
  if (started) CancelSamples();
}

void GenerateCall::End(absl::Status status) {
  bool started = false;
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
    started = started_;
  }
  // Before the client learns of it: it may send the id again at once.
  context_.registry->Remove(key_);
  place_ = nullptr;
  writer_->Finish(std::move(status));
  if (started) CancelSamples();
}

void GenerateCall::CancelSamples() {
  for (const auto& sample : samples_) sample->Cancel();
}

}  // namespace weft
