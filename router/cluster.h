#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/cluster_snapshot.h"
#include "router/fair_queue.h"
#include "router/group_link.h"
#include "router/policy.h"
#include "router/prompt_blocks.h"
#include "router/retry_budget.h"
#include "router/seldom.h"
#include "server/base/mutex.h"

namespace weft {

struct ClusterOptions {
  // host:port or unix-abstract:NAME of each group's leader; SetGroups() changes them.
  std::vector<std::string> addresses;
  GroupLinkOptions link;
  RoutingPolicy policy = RoutingPolicy::kPrefixAware;
  std::int64_t request_tokens = 128;  // of Policy
  // Requests that may wait for a group that is ready and takes them, and for how long.
  std::int64_t max_waiting = 1024;
  std::chrono::milliseconds queue_timeout{30000};
  RetryBudgetOptions retry_budget;
  // That of requests' deadlines.
  std::function<std::chrono::system_clock::time_point()> system_now =
      std::chrono::system_clock::now;
  // Without a thread of its own somebody calls Tick().
  bool ticks_itself = true;
};

// What is to be placed.
struct PlaceRequest {
  std::shared_ptr<PromptBlocks> prompt;
  std::int64_t more_tokens = 0;      // behind the prompt, already produced
  std::int64_t max_tokens = 0;       // that may be generated; 0: it does not say
  std::int32_t priority = 0;         // lower is sooner
  std::string tenant;                // may be empty
  bool admitted = false;             // a group had taken it: before all others
  bool retry = false;                // a group has refused it: within the retry budget
  const GroupLink* avoid = nullptr;  // where it has been, and was not answered; may be null
  // When it was to be placed first: it waits no longer than queue_timeout from then.
  std::chrono::steady_clock::time_point since;
  std::chrono::system_clock::time_point deadline = std::chrono::system_clock::time_point::max();
};

// The groups behind this router, and the requests that wait for one of them: while none is ready,
// or those that are have as many as they take. They go by priority, then fairly between tenants, by
// tokens, then by arrival.
//
// Thread-safe. Tick(), on a thread of its own, opens connections, notices silence and timeouts, and
// places requests that wait when a group has room again.
class Cluster {
 public:
  using Clock = std::chrono::steady_clock;
  using PlaceHandler = std::function<void(absl::StatusOr<GroupLease>)>;
  enum class WaitId : std::uint64_t {};

  explicit Cluster(ClusterOptions options);
  // Fails what still waits, cancels the calls, and waits until every GroupLease is returned.
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  std::shared_ptr<const ClusterSnapshot> Snapshot() const;
  std::vector<std::shared_ptr<GroupLink>> links() const {
    MutexLock lock(mutex_);
    return links_;
  }
  // From now on the groups are those at `addresses`. One that is not there any more gets no new
  // request; those that it has go on. One thread at a time.
  void SetGroups(const std::vector<std::string>& addresses);
  // Requests that wait for a group.
  std::int64_t num_waiting() const {
    MutexLock lock(mutex_);
    return static_cast<std::int64_t>(waiting_.size());
  }
  Clock::time_point now() const { return options_.link.now(); }

  struct Placed {
    std::uint64_t prompt_tokens = 0;
    std::uint64_t cached_tokens = 0;  // of these, in the prefix cache of the group that was chosen
  };
  // Of all requests so far.
  Placed placed() const {
    MutexLock lock(mutex_);
    return placed_;
  }

  // Every 50 ms or so, by one thread.
  void Tick(Clock::time_point now);

  // A name for one Place(), so that it can be cancelled while it is still on its way into the
  // queue.
  WaitId NewWait();
  // Chooses a group for a request and calls `done` once, here or later on another thread:
  // INVALID_ARGUMENT  the prompt is too long for every ready group;
  // UNAVAILABLE       no group became ready within queue_timeout (NOT_READY);
  // RESOURCE_EXHAUSTED  (OVERLOADED) max_waiting requests wait already; those that are ready were
  //                   full for queue_timeout; it would wait beyond its deadline, as things went
  //                   lately. Only the second for one that is `admitted`.
  void Place(WaitId id, PlaceRequest request, PlaceHandler done);

  // A group that may compute a prompt for the one of `decode`, if there is one: ready, of the same
  // KV, and another.
  std::optional<GroupLease> PlacePrefill(const GroupLease& decode, const PlaceRequest& request);

  // Whether another group than `group` is ready and takes requests.
  bool HasRoomBeside(const GroupLink& group) const {
    MutexLock lock(mutex_);
    return HasRoom(&group);
  }

  // Forgets a request that waits. False when it does not yet wait, and when its handler has run or
  // is about to.
  bool CancelPlace(WaitId id);

 private:
  struct Waiter {
    WaitId id;
    PlaceRequest request;
    PlaceHandler done;
  };
  struct Outcome {
    PlaceHandler done;
    absl::StatusOr<GroupLease> result;
  };

  using Queue = FairQueue<Waiter>;

  void OnChange();
  void OnRoom();
  void RunTicker();
  // Places those that wait as far as there is room, and fails those whose time is over.
  void PlaceWaiting();
  void FailOverdue(Clock::time_point now);
  void WarnOfMismatch(const GroupLink& link, const GroupSnapshot& prefill, const GroupLease& decode)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitedTooLong() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // An error when it may not wait; whoever has to go for it is added to `outcomes`.
  absl::Status Enqueue(Waiter& waiter, std::vector<Outcome>& outcomes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED when `request` comes too late if `ahead` are before it.
  absl::Status CheckDeadline(const PlaceRequest& request, std::int64_t ahead,
                             absl::Span<const LinkLoad> groups) const;
  bool HasRoom(const GroupLink* except = nullptr) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishSnapshot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Links to groups that are gone from the addresses, once nothing of them is left.
  void DropLeaving();
  GroupLoad LoadOf(const GroupSnapshot& group, const GroupLink& link, const LinkLoad& load,
                   const PromptBlocks& prompt) const;
  // A lease, an error, or nothing while no ready group takes it.
  std::optional<absl::StatusOr<GroupLease>> TryPlace(const PlaceRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ClusterOptions options_;

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<GroupLink>> links_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<GroupLink>> leaving_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Queue waiting_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> any_waiting_{false};  // written with mutex_ held
  RetryBudget retry_budget_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const ClusterSnapshot> snapshot_ ABSL_GUARDED_BY(mutex_);
  Policy policy_ ABSL_GUARDED_BY(mutex_);
  Policy prefill_policy_ ABSL_GUARDED_BY(mutex_);  // has a turn of its own
  Seldom mismatches_ ABSL_GUARDED_BY(mutex_);
  Placed placed_ ABSL_GUARDED_BY(mutex_);

  Mutex ticker_mutex_;  // taken last
  CondVar wake_ticker_;
  bool has_room_ ABSL_GUARDED_BY(ticker_mutex_) = false;  // somewhere, perhaps
  bool ticker_stops_ ABSL_GUARDED_BY(ticker_mutex_) = false;

  std::atomic<std::uint64_t> next_wait_{0};
  std::thread ticker_;
};

}  // namespace weft
