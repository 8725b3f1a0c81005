#include "router/prefill_leg.h"

#include <utility>

#include "server/base/log.h"

namespace weft {

PrefillLeg::PrefillLeg(std::shared_ptr<Owner> owner, Options options)
    : owner_(std::move(owner)), options_(std::move(options)) {}

void PrefillLeg::OnReserved(const v1::KvReserved& reserved) {
  {
    MutexLock lock(mutex_);
    if (cancelled_) return;
    started_ = true;
  }
  GroupLease prefill = *std::move(options_.prefill);
  v1::WorkerGenerateRequest& request = options_.request;
  const std::int64_t uncached = std::int64_t{request.prompt_token_ids_size()} +
                                request.resume_token_ids_size() - reserved.first_position();
  if (uncached < options_.min_tokens) {
    if (options_.metrics != nullptr) options_.metrics->OnHandoff("short");
    Continue("the uncached part of the prompt is short");
    return;
  }
  request.clear_kv_receive();
  v1::KvTarget& target = *request.mutable_kv_send();
  target.set_transfer_id(reserved.transfer_id());
  target.set_first_position(reserved.first_position());
  *target.mutable_endpoint() = std::move(options_.target);
  spdlog::debug("request {}: transfer {:016x}, {} tokens, {} -> {}", request.request_id(),
                reserved.transfer_id(), uncached, prefill.link().address(),
                options_.decode->address());
  const auto call = std::make_shared<WorkerCall>(std::move(prefill), request, shared_from_this());
  {
    MutexLock lock(mutex_);
    if (cancelled_) return;
    call_ = call;
  }
  call->Start(options_.deadline);
}

void PrefillLeg::OnWorkerMessage(v1::WorkerGenerateResponse& response) {
  if (response.token_ids().empty()) return;
  first_token_ = response.token_ids(0);
  finished_ = !owner_->OnPrefillMessage(*this, response);
  if (!finished_) Continue("");
}

void PrefillLeg::OnWorkerEnd(absl::Status status) {
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    call_ = nullptr;
    cancelled = cancelled_;
  }
  if (options_.metrics != nullptr && !cancelled) {
    options_.metrics->OnHandoff(status.ok() || finished_ ? "done" : "failed");
  }
  if (status.ok() || finished_ || cancelled) return;
  spdlog::warn("request {}: the prompt is computed by the decode group {}: {}",
               options_.request.request_id(), options_.decode->address(),
               std::string(status.message()));
  Continue(std::string(status.message()));
}

void PrefillLeg::Continue(const std::string& failure) {
  v1::ContinueKvRequest request;
  request.set_request_id(options_.request.request_id());
  request.set_attempt(options_.request.attempt());
  if (first_token_.has_value()) request.set_first_token(*first_token_);
  request.set_failure(failure);
  options_.decode->client().ContinueKv(std::move(request));
}

void PrefillLeg::Cancel(const char* outcome) {
  std::shared_ptr<WorkerCall> call;
  std::optional<GroupLease> unused;  // given back without the lock
  {
    MutexLock lock(mutex_);
    if (cancelled_ || call_ == nullptr) outcome = nullptr;  // counted, or never asked for
    cancelled_ = true;
    call = call_;
    if (!started_) unused.swap(options_.prefill);
  }
  if (options_.metrics != nullptr && outcome != nullptr) options_.metrics->OnHandoff(outcome);
  if (call != nullptr) call->Cancel();
}

}  // namespace weft
