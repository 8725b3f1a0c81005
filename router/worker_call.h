#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "router/group_link.h"
#include "router/leader_client.h"
#include "server/base/mutex.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// One Worker.Generate call. Lives until its end; nobody else needs to hold it.
class WorkerCall : private LeaderClient::GenerateHandler,
                   public std::enable_shared_from_this<WorkerCall> {
 public:
  // What comes from the leader, on the wire's threads, one call at a time, OnWorkerEnd() last.
  class Handler {
   public:
    virtual ~Handler() = default;
    // May move out of `response`.
    virtual void OnWorkerMessage(v1::WorkerGenerateResponse& response) = 0;
    // OK after the leader's last message; UNAVAILABLE with RANK_LOST when the group or the
    // connection was lost, with NOT_READY when the request was never sent; CANCELLED after
    // Cancel(); else what the leader said.
    virtual void OnWorkerEnd(absl::Status status) = 0;
    // The group has said nothing for first_token_timeout, while others are ready: true to leave it,
    // which ends the call as NOT_READY. Any time before OnWorkerEnd(), perhaps again later.
    virtual bool OnWorkerLate(const GroupLink& group) = 0;
  };

  WorkerCall(GroupLease lease, v1::WorkerGenerateRequest request, std::shared_ptr<Handler> handler);

  // Once. OnWorkerEnd() may run inside when the group is gone already.
  void Start(std::chrono::system_clock::time_point deadline);
  // Any thread, any time. OnWorkerEnd() follows.
  void Cancel();

 private:
  void OnResponse(v1::WorkerGenerateResponse& response) override;
  void OnGenerateEnd(const absl::Status& status) override;

  void OnLate();
  void CancelStream();
  void End(absl::Status status);

  GroupLease lease_;
  const v1::WorkerGenerateRequest request_;
  const std::weak_ptr<Handler> late_handler_;  // for OnLate(), that may come as the call ends
  std::shared_ptr<Handler> handler_;
  std::shared_ptr<WorkerCall> self_;  // until the end
  Mutex mutex_;
  std::shared_ptr<LeaderClient::Stream> stream_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::uint64_t> call_id_;
  bool answered_ = false;
  std::atomic<bool> late_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> group_lost_{false};
};

}  // namespace weft
