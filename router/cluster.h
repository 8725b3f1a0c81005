#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/cluster_snapshot.h"
#include "router/group_link.h"
#include "router/policy.h"
#include "router/prompt_blocks.h"
#include "server/base/mutex.h"

namespace weft {

struct ClusterOptions {
  // host:port or unix-abstract:NAME of each group's leader.
  std::vector<std::string> addresses;
  GroupLinkOptions link;
  RoutingPolicy policy = RoutingPolicy::kPrefixAware;
  std::int64_t request_tokens = 128;  // of Policy
  // Requests that may wait for a group to become ready, and for how long.
  std::int64_t max_waiting = 1024;
  std::chrono::milliseconds queue_timeout{30000};
  // Without a thread of its own somebody calls Tick().
  bool ticks_itself = true;
};

// What is to be placed.
struct PlaceRequest {
  std::shared_ptr<PromptBlocks> prompt;
  std::int64_t more_tokens = 0;  // behind the prompt, already produced
  bool admitted = false;         // a group had taken it
};

// The groups behind this router, and the requests that wait for one of them.
//
// Thread-safe. Tick(), on a thread of its own, opens connections and notices silence and timeouts.
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
  // In the order of options.addresses.
  absl::Span<const std::shared_ptr<GroupLink>> links() const { return links_; }
  // Requests that wait for a group.
  std::int64_t num_waiting() const {
    MutexLock lock(mutex_);
    return static_cast<std::int64_t>(waiting_.size());
  }

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
  // UNAVAILABLE       no group became ready within queue_timeout;
  // RESOURCE_EXHAUSTED  max_waiting requests wait already; not for one that is `admitted`.
  void Place(WaitId id, PlaceRequest request, PlaceHandler done);

  // A group that may compute a prompt for the one of `decode`, if there is one: ready, of the same
  // KV, and another.
  std::optional<GroupLease> PlacePrefill(const GroupLease& decode, const PlaceRequest& request);

  // Forgets a request that waits. False when it does not yet wait, and when its handler has run or
  // is about to.
  bool CancelPlace(WaitId id);

 private:
  struct Waiter {
    WaitId id;
    PlaceRequest request;
    Clock::time_point deadline;
    PlaceHandler done;
  };
  struct Outcome {
    PlaceHandler done;
    absl::StatusOr<GroupLease> result;
  };

  void OnChange(std::size_t index);
  void RunTicker();
  void FailOverdue(Clock::time_point now);
  // Once, until the reason changes.
  void WarnOfMismatch(const GroupLink& link, const GroupSnapshot& prefill, const GroupLease& decode)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  GroupLoad LoadOf(std::size_t index, const GroupSnapshot& group, const PromptBlocks& prompt) const;
  // A lease, an error, or UNAVAILABLE while no group is ready.
  absl::StatusOr<GroupLease> TryPlace(const PlaceRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ClusterOptions options_;
  std::vector<std::shared_ptr<GroupLink>> links_;  // as options_.addresses; never changes

  mutable Mutex mutex_;
  CondVar wake_ticker_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Waiter> waiting_ ABSL_GUARDED_BY(mutex_);  // oldest first: deadlines grow
  std::shared_ptr<const ClusterSnapshot> snapshot_ ABSL_GUARDED_BY(mutex_);
  Policy policy_ ABSL_GUARDED_BY(mutex_);
  Policy prefill_policy_ ABSL_GUARDED_BY(mutex_);  // has a turn of its own
  std::string last_mismatch_ ABSL_GUARDED_BY(mutex_);
  Placed placed_ ABSL_GUARDED_BY(mutex_);

  std::atomic<std::uint64_t> next_wait_{0};
  std::thread ticker_;
};

}  // namespace weft
