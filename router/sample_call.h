#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/cluster.h"
#include "router/prefill_leg.h"
#include "router/router_metrics.h"
#include "router/sample_output.h"
#include "router/worker_call.h"
#include "server/base/mutex.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// One sample of a request on its way: place, stream from the leader, place again while no group
// has taken it, and replay it when its group was lost: go on from the prompt and the tokens so far,
// of which the client notices a pause. Owned by its request; whoever has to call it next (cluster,
// WorkerCall) holds that.
//
// Where there is a group that computes prompts for the chosen one, the prompt goes there first: see
// PrefillLeg. Whichever of the two says a token first is believed, and the other's is dropped.
class SampleCall final : public WorkerCall::Handler, private PrefillLeg::Owner {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // `produced` are the tokens that the client has from this call. INVALID_ARGUMENT when the
    // request does not fit a vocabulary of so many ids.
    virtual absl::StatusOr<v1::WorkerGenerateRequest> MakeWorkerRequest(
        std::int32_t index, absl::Span<const std::int32_t> produced,
        std::int32_t vocab_size) const = 0;
    // It goes to `group` now.
    virtual void OnSamplePlaced(const std::string& group) = 0;
    virtual void OnSampleMessage(v1::GenerateResponse message) = 0;
    // Last, once. OK only when a message had a finish reason.
    virtual void OnSampleEnd(std::int32_t index, absl::Status status) = 0;
  };

  struct Options {
    Cluster* cluster = nullptr;
    RouterMetrics* metrics = nullptr;  // may be null
    std::uint32_t max_attempts = 1;    // how often it is placed before a group takes it
    std::uint32_t max_replays = 0;     // how many groups it may lose
    std::shared_ptr<PromptBlocks> prompt;
    std::int32_t priority = 0;
    std::string tenant;
    std::int64_t max_tokens = 0;             // 0: any number
    std::int64_t resumed_tokens = 0;         // behind the prompt: the client has them already
    std::int64_t pd_min_prefill_tokens = 0;  // fewer are computed where they are continued
    std::chrono::system_clock::time_point deadline;
  };

  SampleCall(Owner& owner, std::int32_t index, const Options& options, SampleOutput output);

  // Once; `self` shares the owner's life. OnSampleEnd() may run inside.
  void Start(std::weak_ptr<SampleCall> self);
  // Any thread, any time, also before Start(). OnSampleEnd() follows, perhaps inside.
  void Cancel();

  // Before Start() and after OnSampleEnd().
  SampleOutput& output() { return output_; }

 private:
  void OnWorkerMessage(v1::WorkerGenerateResponse& response) override;
  void OnWorkerEnd(absl::Status status) override;
  bool OnWorkerLate(const GroupLink& group) override;
  bool OnPrefillMessage(const PrefillLeg& leg, v1::WorkerGenerateResponse& response) override;

  void Place();
  PlaceRequest ToPlace() const;
  void OnPlaced(absl::StatusOr<GroupLease> lease);
  // Null when the chosen group computes the prompt itself.
  std::shared_ptr<PrefillLeg> MakePrefillLeg(const GroupLease& decode,
                                             v1::WorkerGenerateRequest& request);
  // Hands it to the owner. True when the sample is finished.
  bool Pass(v1::WorkerGenerateResponse& response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(output_mutex_);
  // Whether it goes on elsewhere after its stream ended like that.
  bool GoesOnAfter(const absl::Status& status);
  void End(absl::Status status) { owner_.OnSampleEnd(index_, std::move(status)); }

  Owner& owner_;
  const std::int32_t index_;
  const Options options_;
  std::weak_ptr<SampleCall> self_;

  Mutex output_mutex_;  // the two groups may speak at a time
  std::shared_ptr<PrefillLeg> leg_ ABSL_GUARDED_BY(output_mutex_);  // of this placement
  std::int32_t num_resumed_ ABSL_GUARDED_BY(output_mutex_) = 0;     // with it: before produced_

  // These two under output_mutex_ while there is a leg. Each stage is over before the next one
  // starts, so that else they, and those below, need no lock.
  SampleOutput output_;
  std::vector<std::int32_t> produced_;  // what the client has from this call
  std::uint32_t refusals_ = 0;          // of this placement
  bool retry_ = false;                  // likewise: a group has refused it, or has too many
  std::optional<Cluster::Clock::time_point> since_;  // likewise
  std::uint32_t replays_ = 0;
  bool taken_ = false;     // this placement's leader has said something
  bool admitted_ = false;  // a group had taken it and was lost, or drained

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  const GroupLink* late_group_ ABSL_GUARDED_BY(mutex_) = nullptr;  // is left by this placement
  const GroupLink* avoid_ = nullptr;                               // by the one before
  std::optional<Cluster::WaitId> wait_ ABSL_GUARDED_BY(mutex_);    // the newest
  std::shared_ptr<WorkerCall> worker_call_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
