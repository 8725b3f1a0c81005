#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "router/group_link.h"
#include "router/router_metrics.h"
#include "router/worker_call.h"
#include "server/base/mutex.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// The part of a request that another group computes: its prompt, and with it the first token.
// Starts when the group that goes on with it, the decode group, has reserved what it needs, and
// lets that one go on: with the first token, or, whatever goes wrong here, by itself.
//
// Thread-safe.
class PrefillLeg final : public WorkerCall::Handler,
                         public std::enable_shared_from_this<PrefillLeg> {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // The first token. False when the request is over with it.
    virtual bool OnPrefillMessage(const PrefillLeg& leg, v1::WorkerGenerateResponse& response) = 0;
  };

  struct Options {
    GroupLink* decode = nullptr;        // lives as long as any lease
    v1::KvEndpoint target;              // the decode group's
    std::optional<GroupLease> prefill;  // there is one
    v1::WorkerGenerateRequest request;  // as the decode group has it
    // Fewer uncached tokens than this the decode group computes itself.
    std::int64_t min_tokens = 0;
    std::chrono::system_clock::time_point deadline;
    RouterMetrics* metrics = nullptr;  // may be null
  };

  PrefillLeg(std::shared_ptr<Owner> owner, Options options);

  // Once at most.
  void OnReserved(const v1::KvReserved& reserved);
  // The decode group does not wait for it any more, or the request is over. `outcome` is how the
  // hand-off is counted if the prefill group's stream has not ended yet; null: not at all.
  void Cancel(const char* outcome);

 private:
  void OnWorkerMessage(v1::WorkerGenerateResponse& response) override;
  void OnWorkerEnd(absl::Status status) override;
  bool OnWorkerLate(const GroupLink&) override { return true; }  // the decode group can do it

  void Continue(const std::string& failure);

  const std::shared_ptr<Owner> owner_;
  Options options_;
  std::optional<std::int32_t> first_token_;  // of the call's thread
  bool finished_ = false;                    // likewise: the request, with its first token

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // options_.prefill is OnReserved()'s
  std::shared_ptr<WorkerCall> call_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
