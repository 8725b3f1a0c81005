#include "router/generate_call.h"

#include <random>
#include <utility>

#include "fmt/format.h"
#include "server/error_reason.h"

namespace weft {
namespace {

std::uint64_t DrawUint64() {
  thread_local std::random_device device;
  return std::uniform_int_distribution<std::uint64_t>()(device);
}

std::int64_t ResponseBytes(const v1::GenerateResponse& response) {
  constexpr std::int64_t kFixedBytes = 32;
  constexpr std::int64_t kBytesPerId = sizeof(std::int32_t);
  return kFixedBytes + static_cast<std::int64_t>(response.text().size()) +
         kBytesPerId * (response.token_ids_size() + response.prompt_token_ids_size());
}

bool MergeResponses(v1::GenerateResponse& into, v1::GenerateResponse& next) {
  into.mutable_token_ids()->MergeFrom(next.token_ids());
  into.mutable_prompt_token_ids()->MergeFrom(next.prompt_token_ids());
  into.mutable_text()->append(next.text());
  *into.mutable_usage() = next.usage();
  into.set_finish_reason(next.finish_reason());
  return true;
}

}  // namespace

StreamWriterOptions<v1::GenerateResponse> ResponseStreamOptions(const GenerateContext& context) {
  return {.max_bytes = context.max_stream_buffer_bytes,
          .size_bytes = ResponseBytes,
          .merge = MergeResponses};
}

GenerateCall::GenerateCall(const GenerateContext& context, v1::GenerateRequest request,
                           std::chrono::system_clock::time_point deadline)
    : context_(context), request_(std::move(request)), deadline_(deadline) {}

void GenerateCall::Start(std::shared_ptr<Writer> writer) {
  writer_ = std::move(writer);
  if (absl::Status status = ValidateRequest(request_, context_.limits); !status.ok()) {
    writer_->Finish(std::move(status));
    return;
  }
  if (request_.request_id().empty()) {
    request_.set_request_id(fmt::format("{:016x}{:016x}", DrawUint64(), DrawUint64()));
  }
  if (!request_.sampling().has_seed()) request_.mutable_sampling()->set_seed(DrawUint64());
  if (context_.tokenizer != nullptr) detokenizer_.emplace(*context_.tokenizer);

  if (request_.has_token_ids()) {
    prompt_.assign(request_.token_ids().ids().begin(), request_.token_ids().ids().end());
    request_.clear_token_ids();
    Place();
    return;
  }
  absl::Status accepted = context_.text_pool->Submit([self = shared_from_this()] {
    if (absl::Status status = self->Tokenize(); !status.ok()) {
      self->writer_->Finish(std::move(status));
    } else {
      self->Place();
    }
  });
  if (!accepted.ok()) writer_->Finish(std::move(accepted));
}

absl::Status GenerateCall::Tokenize() {
  {
    MutexLock lock(mutex_);
    if (client_gone_) return absl::CancelledError("cancelled by the client");
  }
  absl::StatusOr<std::vector<std::int32_t>> ids =
      context_.tokenizer->Encode(request_.text(), /*add_special_tokens=*/false);
  if (!ids.ok()) return ids.status();
  prompt_ = *std::move(ids);
  request_.clear_text();
  return absl::OkStatus();
}

void GenerateCall::Place() {
  const Cluster::WaitId wait =
      context_.cluster->Place(static_cast<std::int64_t>(prompt_.size()),
                              [self = shared_from_this()](absl::StatusOr<GroupLease> lease) {
                                self->OnPlaced(std::move(lease));
                              });
  bool client_gone = false;
  {
    MutexLock lock(mutex_);
    wait_ = wait;
    client_gone = client_gone_;
  }
  if (client_gone) context_.cluster->CancelPlace(wait);
}

void GenerateCall::OnPlaced(absl::StatusOr<GroupLease> lease) {
  absl::Status status = lease.status();
  if (status.ok()) {
    status =
        ValidateTokens(prompt_, request_.sampling().stop_token_ids(), lease->snapshot().vocab_size);
  }
  if (!status.ok()) {
    writer_->Finish(std::move(status));
    return;
  }
  auto call =
      std::make_shared<WorkerCall>(*std::move(lease), MakeWorkerRequest(), shared_from_this());
  {
    MutexLock lock(mutex_);
    if (client_gone_) return;
    worker_call_ = call;
  }
  call->Start(deadline_);
}

v1::WorkerGenerateRequest GenerateCall::MakeWorkerRequest() const {
  v1::WorkerGenerateRequest request;
  request.set_request_id(request_.request_id());
  request.mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  *request.mutable_sampling() = request_.sampling();
  request.set_attempt(attempt_);
  return request;
}

void GenerateCall::OnWorkerMessage(const v1::WorkerGenerateResponse& response) {
  v1::GenerateResponse message;
  message.set_request_id(request_.request_id());
  *message.mutable_token_ids() = response.token_ids();
  message.set_finish_reason(response.finish_reason());
  if (!started_stream_) message.mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  started_stream_ = true;
  finished_ = response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED;

  if (detokenizer_) {
    message.set_text(detokenizer_->Append(response.token_ids()));
    if (finished_) message.mutable_text()->append(detokenizer_->Finish());
  }
  completion_tokens_ += response.token_ids_size();
  message.mutable_usage()->set_prompt_tokens(static_cast<std::int32_t>(prompt_.size()));
  message.mutable_usage()->set_completion_tokens(completion_tokens_);
  writer_->Write(std::move(message));
}

void GenerateCall::OnWorkerEnd(absl::Status status) {
  bool client_gone = false;
  {
    MutexLock lock(mutex_);
    worker_call_ = nullptr;
    client_gone = client_gone_;
  }
  const std::string reason = ReasonOf(status);
  const bool refused = reason == kReasonNotReady || reason == kReasonDraining;
  if (refused && !client_gone && !started_stream_ && ++attempt_ < context_.max_attempts) {
    Place();
    return;
  }
  // Who has been told how it finished does not care how the leader's stream ended.
  if (finished_) {
    status = absl::OkStatus();
  } else if (status.ok()) {
    status = absl::InternalError("the leader ended the stream without a finish reason");
  }
  writer_->Finish(std::move(status));
}

void GenerateCall::OnClientGone() {
  std::optional<Cluster::WaitId> wait;
  std::shared_ptr<WorkerCall> worker_call;
  {
    MutexLock lock(mutex_);
    client_gone_ = true;
    wait = wait_;
    worker_call = worker_call_;
  }
  if (wait) context_.cluster->CancelPlace(*wait);
  if (worker_call != nullptr) worker_call->Cancel();
}

}  // namespace weft
