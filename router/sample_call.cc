#include "router/sample_call.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/error_reason.h"

namespace weft {
namespace {

absl::Status Cancelled() { return absl::CancelledError("cancelled"); }

// Grows with every call, and with time, so over routers, too: whoever sends a request id again,
// here or elsewhere, takes over from what still runs of it.
std::uint64_t NextAttempt() {
  static std::atomic<std::int64_t> last{0};
  std::int64_t before = last;
  std::int64_t next = 0;
  do {
    next = std::max(before + 1, absl::ToUnixMicros(absl::Now()));
  } while (!last.compare_exchange_weak(before, next));
  return static_cast<std::uint64_t>(next);
}

}  // namespace

SampleCall::SampleCall(Owner& owner, std::int32_t index, const Options& options,
                       SampleOutput output)
    : owner_(owner), index_(index), options_(options), output_(std::move(output)) {}

void SampleCall::Start(std::weak_ptr<SampleCall> self) {
  self_ = std::move(self);
  Place();
}

void SampleCall::Place() {
  Cluster& cluster = *options_.cluster;
  const Cluster::WaitId wait = cluster.NewWait();
  if (!since_) since_ = cluster.now();
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    wait_ = wait;
    cancelled = cancelled_;
  }
  if (cancelled) {
    End(Cancelled());
    return;
  }
  cluster.Place(wait, ToPlace(), [self = self_.lock()](absl::StatusOr<GroupLease> lease) {
    self->OnPlaced(std::move(lease));
  });
  // A Cancel() that came before the request was in the queue did not find it there.
  {
    MutexLock lock(mutex_);
    cancelled = cancelled_;
  }
  if (cancelled && cluster.CancelPlace(wait)) End(Cancelled());
}

PlaceRequest SampleCall::ToPlace() const {
  return {.prompt = options_.prompt,
          .more_tokens = options_.resumed_tokens + static_cast<std::int64_t>(produced_.size()),
          .max_tokens = options_.max_tokens,
          .priority = options_.priority,
          .tenant = options_.tenant,
          .admitted = admitted_,
          .retry = retry_,
          .avoid = avoid_,
          .since = *since_,
          .deadline = options_.deadline};
}

void SampleCall::OnPlaced(absl::StatusOr<GroupLease> lease) {
  if (!lease.ok()) {
    End(lease.status());
    return;
  }
  absl::StatusOr<v1::WorkerGenerateRequest> request =
      owner_.MakeWorkerRequest(index_, produced_, lease->snapshot().vocab_size);
  if (!request.ok()) {
    End(request.status());
    return;
  }
  request->set_attempt(NextAttempt());
  owner_.OnSamplePlaced(lease->link().address());
  const std::shared_ptr<PrefillLeg> leg = MakePrefillLeg(*lease, *request);
  {
    MutexLock lock(output_mutex_);
    leg_ = leg;
    num_resumed_ = request->resume_token_ids_size() - static_cast<std::int32_t>(produced_.size());
  }
  auto call = std::make_shared<WorkerCall>(*std::move(lease), *std::move(request), self_.lock());
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    cancelled = cancelled_;
    if (!cancelled) worker_call_ = call;
  }
  if (!cancelled) {
    call->Start(options_.deadline);
    return;
  }
  {
    MutexLock lock(output_mutex_);
    leg_ = nullptr;
  }
  End(Cancelled());
}

std::shared_ptr<PrefillLeg> SampleCall::MakePrefillLeg(const GroupLease& decode,
                                                       v1::WorkerGenerateRequest& request) {
  const std::int64_t num_tokens =
      std::int64_t{request.prompt_token_ids_size()} + request.resume_token_ids_size();
  // Its logprobs come from whoever computes the prompt: that stays one group.
  if (num_tokens < options_.pd_min_prefill_tokens || request.sampling().has_prompt_logprobs()) {
    return nullptr;
  }
  std::optional<GroupLease> prefill = options_.cluster->PlacePrefill(decode, ToPlace());
  if (!prefill.has_value()) return nullptr;
  const v1::KvEndpoint& target = *decode.snapshot().kv;
  request.set_kv_receive(target.format());
  return std::make_shared<PrefillLeg>(
      std::shared_ptr<PrefillLeg::Owner>(self_.lock(), this),
      PrefillLeg::Options{.decode = &decode.link(),
                          .target = target,
                          .prefill = *std::move(prefill),
                          .request = request,
                          .min_tokens = options_.pd_min_prefill_tokens,
                          .deadline = options_.deadline,
                          .metrics = options_.metrics});
}

void SampleCall::OnWorkerMessage(v1::WorkerGenerateResponse& response) {
  const bool last = response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
  std::shared_ptr<PrefillLeg> leg;
  bool finished = false;
  {
    MutexLock lock(output_mutex_);
    leg = leg_;
    taken_ = true;
    finished = Pass(response);
  }
  if (leg != nullptr && response.has_kv_reserved()) leg->OnReserved(response.kv_reserved());
  if (leg != nullptr && !response.kv_failure().empty()) leg->Cancel("failed");
  if (!finished || last) return;
  // A stop string: the leader does not know yet.
  std::shared_ptr<WorkerCall> call;
  {
    MutexLock lock(mutex_);
    call = worker_call_;
  }
  if (call != nullptr) call->Cancel();
}

bool SampleCall::OnPrefillMessage(const PrefillLeg& leg, v1::WorkerGenerateResponse& response) {
  {
    MutexLock lock(output_mutex_);
    if (&leg != leg_.get()) return false;  // of a placement that is over
    if (!Pass(response)) return true;
  }
  std::shared_ptr<WorkerCall> call;
  {
    MutexLock lock(mutex_);
    call = worker_call_;
  }
  if (call != nullptr) call->Cancel();
  return false;
}

bool SampleCall::Pass(v1::WorkerGenerateResponse& response) {
  if (leg_ != nullptr && response.token_ids_size() > 0) {
    const std::int32_t known = num_resumed_ + static_cast<std::int32_t>(produced_.size());
    const int said =
        std::clamp(known - response.first_output_index(), 0, response.token_ids_size());
    response.mutable_token_ids()->ExtractSubrange(0, said, nullptr);
    if (response.logprobs_size() > 0) response.mutable_logprobs()->DeleteSubrange(0, said);
  }
  v1::GenerateResponse message;
  if (output_.Read(response, message)) {
    produced_.insert(produced_.end(), message.token_ids().begin(), message.token_ids().end());
    owner_.OnSampleMessage(std::move(message));
  }
  return output_.finished();
}

void SampleCall::OnWorkerEnd(absl::Status status) {
  std::shared_ptr<PrefillLeg> leg;
  {
    MutexLock lock(output_mutex_);
    leg.swap(leg_);
  }
  // The decode group may be through before the prefill group has said that it is.
  if (leg != nullptr) leg->Cancel(status.ok() || output_.finished() ? "done" : nullptr);
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    worker_call_ = nullptr;
    cancelled = cancelled_;
    avoid_ = std::exchange(late_group_, nullptr);
  }
  if (!cancelled && !output_.finished() && GoesOnAfter(status)) {
    Place();
    return;
  }
  // Who has been told how it finished does not care how the leader's stream ended.
  if (output_.finished()) {
    status = absl::OkStatus();
  } else if (status.ok()) {
    status = absl::InternalError("the leader ended the stream without a finish reason");
  }
  End(std::move(status));
}

bool SampleCall::OnWorkerLate(const GroupLink& group) {
  if (!options_.cluster->HasRoomBeside(group)) return false;
  MutexLock lock(mutex_);
  late_group_ = &group;
  return true;
}

bool SampleCall::GoesOnAfter(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  const bool taken = std::exchange(taken_, false);
  if (reason == kReasonRankLost || (taken && reason == kReasonDraining)) {
    // A group that drains has ended what it could not finish in time: nothing was lost.
    if (reason == kReasonRankLost && ++replays_ > options_.max_replays) return false;
    admitted_ = true;
    refusals_ = 0;
    retry_ = false;
    since_.reset();
    if (options_.metrics != nullptr) options_.metrics->OnReplay();
  } else if (reason == kReasonNotReady || reason == kReasonDraining) {
    // It has left one that does not answer only because there was another.
    if (avoid_ == nullptr && ++refusals_ >= options_.max_attempts) return false;
    retry_ = true;
    if (options_.metrics != nullptr) options_.metrics->OnRetry();
  } else if (!taken && reason == kReasonOverloaded) {
    // Until it is taken somewhere, or has waited too long.
    retry_ = true;
    if (options_.metrics != nullptr) options_.metrics->OnRetry();
  } else {
    return false;
  }
  output_.Replay();
  return true;
}

void SampleCall::Cancel() {
  std::optional<Cluster::WaitId> wait;
  std::shared_ptr<WorkerCall> worker_call;
  {
    MutexLock lock(mutex_);
    cancelled_ = true;
    wait = wait_;
    worker_call = worker_call_;
  }
  if (wait && options_.cluster->CancelPlace(*wait)) End(Cancelled());
  if (worker_call != nullptr) worker_call->Cancel();
}

}  // namespace weft
