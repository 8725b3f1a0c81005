#include "router/worker_call.h"

#include <string>
#include <utility>

#include "fmt/format.h"
#include "server/error_reason.h"

namespace weft {
namespace {

absl::Status RankLost(const GroupLease& lease, std::string_view why) {
  return WithReason(absl::UnavailableError(
                        fmt::format("group {} was lost: {}", lease.snapshot().info.address(), why)),
                    kReasonRankLost);
}

// Whether the connection ended the call, not the leader, which gives a reason: gRPC calls it
// UNAVAILABLE, CANCELLED when the leader's server was shut down, UNKNOWN ("Stream removed") when
// the stream was cut in between.
bool ConnectionLost(const absl::Status& status) {
  return ReasonOf(status).empty() && (status.code() == absl::StatusCode::kUnavailable ||
                                      status.code() == absl::StatusCode::kCancelled ||
                                      status.code() == absl::StatusCode::kUnknown);
}

}  // namespace

WorkerCall::WorkerCall(GroupLease lease, v1::WorkerGenerateRequest request,
                       std::shared_ptr<Handler> handler)
    : lease_(std::move(lease)),
      request_(std::move(request)),
      late_handler_(handler),
      handler_(std::move(handler)) {}

void WorkerCall::Start(std::chrono::system_clock::time_point deadline) {
  self_ = shared_from_this();
  GroupLink& link = lease_.link();
  call_id_ = link.AddCall(
      lease_.snapshot().epoch,
      [self = self_] {
        self->group_lost_ = true;
        self->CancelStream();
      },
      [self = self_] { self->OnLate(); });
  if (!call_id_) {
    End(WithReason(absl::UnavailableError(fmt::format("group {} was lost before it had the request",
                                                      lease_.snapshot().info.address())),
                   kReasonNotReady));
    return;
  }
  const std::shared_ptr<LeaderClient::Stream> stream =
      link.client().Generate(request_, deadline, *this);
  {
    MutexLock lock(mutex_);
    stream_ = stream;
  }
  // Who cancelled before found no stream.
  if (cancelled_ || group_lost_) stream->Cancel();
  stream->Start();
}

void WorkerCall::Cancel() {
  cancelled_ = true;
  CancelStream();
}

void WorkerCall::OnLate() {
  const std::shared_ptr<Handler> handler = late_handler_.lock();
  if (handler == nullptr || !handler->OnWorkerLate(lease_.link())) return;
  late_ = true;
  CancelStream();
}

void WorkerCall::CancelStream() {
  std::shared_ptr<LeaderClient::Stream> stream;
  {
    MutexLock lock(mutex_);
    stream = stream_;
  }
  if (stream != nullptr) stream->Cancel();
}

void WorkerCall::OnResponse(v1::WorkerGenerateResponse& response) {
  if (!std::exchange(answered_, true)) {
    lease_.link().AnswerCall(*call_id_);
    lease_.SetOutcome(GroupOutcome::kServed);
  }
  if (!response.token_ids().empty()) lease_.FinishPrefill();
  handler_->OnWorkerMessage(response);
}

void WorkerCall::OnGenerateEnd(const absl::Status& status) {
  absl::Status reason = status;
  if (cancelled_) {
    reason = absl::CancelledError("cancelled by the client");
  } else if (group_lost_) {
    reason = RankLost(lease_, lease_.link().Snapshot()->state);
  } else if (late_) {
    lease_.SetOutcome(GroupOutcome::kFailed);
    End(WithReason(absl::UnavailableError(
                       fmt::format("group {} does not answer", lease_.snapshot().info.address())),
                   kReasonNotReady));
    return;
  } else if (ConnectionLost(reason)) {
    reason = RankLost(lease_, std::string(reason.message()));
  }
  const std::string why = ReasonOf(reason);
  if (why == kReasonNotReady || why == kReasonDraining || why == kReasonRankLost) {
    lease_.link().ReportNotReady(lease_.snapshot().epoch);
  } else if (why == kReasonOverloaded) {
    lease_.link().ReportOverloaded();
  }
  if (why == kReasonRankLost) {
    lease_.SetOutcome(GroupOutcome::kLost);
  } else if (absl::IsInternal(reason) || absl::IsUnknown(reason) || absl::IsDataLoss(reason)) {
    lease_.SetOutcome(GroupOutcome::kFailed);
  }
  End(std::move(reason));
}

void WorkerCall::End(absl::Status status) {
  const std::shared_ptr<WorkerCall> self = std::move(self_);
  if (call_id_) lease_.link().RemoveCall(*call_id_);
  const std::shared_ptr<Handler> handler = std::move(handler_);
  handler->OnWorkerEnd(std::move(status));
}

}  // namespace weft
