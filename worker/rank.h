#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/mutex.h"
#include "worker/engine/step_plan.h"
#include "worker/group/communicator.h"
#include "worker/group/fabric.h"
#include "worker/model/kv_cache.h"
#include "worker/model/rank_model.h"
#include "worker/model/rank_runner.h"
#include "worker/transfer/kv_mover.h"

namespace weft {

// What the join has settled for all ranks of a group.
struct GroupAgreement {
  std::vector<std::string> kv_fabric_addresses;  // [T], the leader's alone
  std::vector<std::string> fabric_addresses;     // [T]
  std::int32_t num_blocks = 0;
  std::int64_t max_model_len = 0;
};

// Whether a rank moves on. Written by its executor, read by anyone.
class Progress {
 public:
  void BeginStep() {
    Touch();
    began_ = std::chrono::steady_clock::now();
    busy_.store(true, std::memory_order_relaxed);
  }
  void EndStep() {
    Touch();
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began_;
    step_ns_.fetch_add(took.count(), std::memory_order_relaxed);
    steps_.fetch_add(1, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_relaxed);
  }
  std::atomic<std::uint64_t>& ticks() { return ticks_; }
  std::uint64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  // Spent in steps that have ended.
  absl::Duration step_time() const {
    return absl::Nanoseconds(step_ns_.load(std::memory_order_relaxed));
  }

  // For the supervisor's health check: true when idle, or when something has happened since the
  // last call; `signs` counts whatever else is a sign of life. One caller.
  bool MovedOrIdle(std::uint64_t signs);

  // When a step last began or ended, or Observe() saw that one got on.
  absl::Time last_progress() const {
    return absl::FromUnixNanos(last_progress_ns_.load(std::memory_order_relaxed));
  }
  // Call it now and then, so that a long step counts as progress; `signs` as above. One caller.
  void Observe(std::uint64_t signs);
  // For probes: UNAVAILABLE, saying since when, if a step has not got on for `timeout`. Any thread.
  absl::Status CheckLiveness(absl::Duration timeout) const;

 private:
  void Touch() { last_progress_ns_.store(absl::GetCurrentTimeNanos(), std::memory_order_relaxed); }

  std::chrono::steady_clock::time_point began_;  // the executor's
  std::atomic<bool> busy_{false};
  std::atomic<std::int64_t> step_ns_{0};
  std::atomic<std::uint64_t> steps_{0};
  std::atomic<std::uint64_t> ticks_{0};  // collectives and layers
  std::atomic<std::int64_t> last_progress_ns_{absl::GetCurrentTimeNanos()};
  std::uint64_t seen_ = 0;      // by MovedOrIdle()
  std::uint64_t observed_ = 0;  // by Observe()
};

// What a rank has exchanged and waited for, as of the end of its last step.
struct RankCounters {
  FabricCounters fabric;
  std::uint64_t collective_received_bytes = 0;
  absl::Duration collective_wait;
};

struct RankOptions {
  std::int32_t max_num_seqs = 64;
  std::int32_t max_num_batched_tokens = 256;
  DcpExchange exchange = DcpExchange::kAgRs;
  absl::Duration stall_timeout = absl::Seconds(3);
  std::optional<MlaForm> mla_form;  // see RunnerOptions
  bool gather_all_logits = false;
  bool graphs = false;            // on a device: record the steps that only decode, and replay them
  bool symmetric_memory = false;  // on devices: see DeviceGroup
};

// What a rank needs that exchanges KV with other groups.
struct KvTransferSetup {
  std::unique_ptr<Fabric> fabric;  // of its own
  KvMoverOptions options;
  KvMover::OnReport on_report;
};

// One rank at work: connected to the others, with KV and a runner. The leader (rank 0) runs plans
// given to RunStep(), which sends them to the followers; those sit in Follow().
//
// Threading: the thread that uses `fabric` (the executor).
class Rank {
 public:
  // Connects to all ranks, allocates KV and workspace, and meets the others in one collective that
  // compares the agreement. All references outlive the rank. Errors: those of the fabric,
  // RESOURCE_EXHAUSTED for memory, FAILED_PRECONDITION when the ranks do not agree.
  static absl::StatusOr<std::unique_ptr<Rank>> Start(const RankModel& model,
                                                     const GroupAgreement& agreement,
                                                     const RankOptions& options, Fabric& fabric,
                                                     kernels::Stream& stream, Progress& progress,
                                                     std::unique_ptr<KvTransferSetup> kv = nullptr);

  // Leader: runs one step on all ranks. The result is valid until the next call. An error ends the
  // group.
  absl::StatusOr<StepOutput> RunStep(const StepPlan& plan);

  // Follower: runs plans as they come, until `stop` is true (OK) or an error that ends the group.
  absl::Status Follow(const std::atomic<bool>& stop);

  const RankRunner& runner() const { return *runner_; }
  std::int64_t kv_bytes() const { return cache_.size_bytes(); }
  // Everything beside weights and KV: activations and the communicators' messages.
  std::int64_t workspace_bytes() const {
    return runner_->workspace_bytes() + world_->workspace_bytes() + dcp_->workspace_bytes();
  }
  // Any thread.
  RankCounters counters() const;
  // Null without KvTransferSetup.
  KvMover* kv_mover() const { return kv_mover_.get(); }

 private:
  Rank(const RankModel& model, const GroupAgreement& agreement, const RankOptions& options,
       Fabric& fabric, Progress& progress);

  // Makes peers and communicators; the result is for MeetOthers() alone.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(kernels::Stream& stream);
  // Lets world_ and dcp_ reach from device to device.
  absl::Status ConnectDevices(Communicator& meeting, kernels::DeviceStream& device);
  absl::Status MeetOthers(Communicator& meeting, kernels::Stream& stream);
  absl::Status SendPlan(const StepPlan& plan);
  // Waits until the plan sent last is out of our hands.
  absl::Status FinishSends();
  // Decodes the message in `inbox_` and runs it.
  absl::Status RunMessage(absl::Span<const std::byte> message);
  // An error says which step met it.
  absl::StatusOr<StepOutput> Execute(const StepPlan& plan);
  void EndStep();

  const RankModel& model_;
  const GroupAgreement agreement_;
  const RankOptions options_;
  Fabric& fabric_;
  Progress& progress_;
  const PlanLimits limits_;
  std::vector<PeerId> peers_;  // [T]; own entry unused
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<Communicator> dcp_;
  KvCache cache_;
  std::unique_ptr<KvMover> kv_mover_;  // ends before cache_
  std::unique_ptr<RankRunner> runner_;

  std::vector<std::int32_t> previous_tokens_;
  std::vector<std::byte> message_;  // leader: the plan being sent
  int sends_in_flight_ = 0;         // of message_
  absl::Status send_status_;

  // Follower: plans that have arrived and wait; at most two are ever on their way.
  static constexpr int kInboxSlots = 4;
  std::vector<std::byte> inbox_[kInboxSlots];
  std::uint64_t received_ = 0;
  std::uint64_t taken_ = 0;
  absl::Status inbox_status_;

  mutable Mutex counters_mutex_;
  RankCounters counters_ ABSL_GUARDED_BY(counters_mutex_);
  StepPlan plan_;
};

}  // namespace weft
