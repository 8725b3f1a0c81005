#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "router/breaker.h"
#include "router/cluster_snapshot.h"
#include "router/group_window.h"
#include "router/leader_client.h"
#include "router/prefix_index.h"
#include "router/service_rate.h"
#include "server/base/mutex.h"

namespace weft {

struct GroupLinkOptions {
  // A leader that says nothing for so long is taken for lost; it speaks every 500 ms.
  std::chrono::milliseconds heartbeat_timeout{3000};
  std::chrono::milliseconds min_backoff{100};
  std::chrono::milliseconds max_backoff{1000};
  bool watch_blocks = false;  // keeps an index of the group's prefix cache
  // Of this router's requests, that wait at a group behind those it runs; the group may take fewer.
  std::int64_t max_waiting = 1024;
  // After a group has refused a request as overloaded, until one more is tried there than it takes.
  std::chrono::milliseconds min_retry_backoff{50};
  std::chrono::milliseconds max_retry_backoff{1000};
  BreakerOptions breaker;
  // A group that comes, or comes back, has a share of the requests that grows for so long. 0: at
  // once.
  std::chrono::milliseconds slow_start{0};
  // A call without an answer for so long may leave for another group. 0: never.
  std::chrono::milliseconds first_token_timeout{0};
  // How leaders are reached; required.
  std::function<std::unique_ptr<LeaderClient>(const std::string& address)> connect;
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// What this router has at a group.
struct LinkLoad {
  std::int64_t in_flight = 0;       // requests that hold a GroupLease
  std::int64_t prefill_tokens = 0;  // of prompts that those have still to compute
  bool full = false;                // the group takes no more of them
  std::int64_t waiting = 0;         // of them, behind what the group runs
  bool breaker_open = false;
  bool broken = false;                      // it is open, and lets no request through now
  double weight = 1;                        // below 1 in a slow start
  std::optional<double> served_per_second;  // if one more would wait
};

// The router's end of one group: the wire to its leader, the WatchState stream that is opened
// again whenever it ends, and the calls that are under way there.
//
// Thread-safe. `on_change` and the handlers of calls run on the wire's threads or in Tick(), with
// no lock of this class held.
class GroupLink final : private LeaderClient::WatchHandler {
 public:
  using Clock = std::chrono::steady_clock;

  // `on_change` runs after every change of Snapshot(); `on_room` whenever Load() may have become
  // less: under this object's lock, so it must not call it.
  GroupLink(std::string address, const GroupLinkOptions& options, std::function<void()> on_change,
            std::function<void()> on_room);
  ~GroupLink() override;
  GroupLink(const GroupLink&) = delete;
  GroupLink& operator=(const GroupLink&) = delete;

  // Opens the WatchState stream when it is time to, and declares the group lost when it is silent.
  // Call a few times per heartbeat_timeout and min_backoff, from one thread.
  void Tick(Clock::time_point now);

  // Loses the group, ends the stream and the calls, and waits until they are over and every
  // GroupLease is returned: no on_change and no on_lost comes afterwards. Once, before destruction.
  void Shutdown();

  const std::string& address() const { return address_; }
  std::shared_ptr<const GroupSnapshot> Snapshot() const;
  LinkLoad Load();
  // How many of the first blocks of a prompt its prefix cache holds, as far as it has said.
  std::size_t CountCached(absl::Span<const BlockHash> blocks) const;
  // Blocks in the index of its prefix cache, and its memory.
  std::pair<std::size_t, std::size_t> IndexSize() const;
  // GroupLeases there have ever been.
  std::uint64_t num_placements() const;
  LeaderClient& client() { return *client_; }

  // Registers a call of the group's incarnation `epoch`; `on_lost` runs if the group is lost
  // before RemoveCall(), `on_late` if it is not answered within first_token_timeout. Nothing when
  // that incarnation is gone already.
  std::optional<std::uint64_t> AddCall(std::uint64_t epoch, std::function<void()> on_lost,
                                       std::function<void()> on_late);
  void AnswerCall(std::uint64_t id);
  void RemoveCall(std::uint64_t id);

  // The leader refused a call, whose lease is still held, as one too many.
  void ReportOverloaded();

  // The leader refused a call as not ready or draining, or lost it: the group is taken for not
  // ready until it is heard of again, and for min_backoff at least, for states that were sent
  // before may be read after. No on_change: nobody waits for that.
  void ReportNotReady(std::uint64_t epoch);

 private:
  friend class GroupLease;
  struct Call {
    std::function<void()> on_lost;
    std::function<void()> on_late;
    Clock::time_point late_at;  // while it is not answered
  };

  void Enter(std::int64_t prefill_tokens);
  void FinishPrefill(std::int64_t prefill_tokens);
  void Leave(GroupOutcome outcome, std::uint64_t epoch);
  // Adds the handlers of calls that are late.
  void FindLate(Clock::time_point now, std::vector<std::function<void()>>& late)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsFull() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnState(v1::GroupState state) override;
  void OnWatchEnd(const absl::Status& status) override;
  // Ends all calls with the group; `why` becomes the state shown to people.
  void Lose(std::string why);
  void Publish(GroupSnapshot snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string address_;
  const GroupLinkOptions options_;
  const std::function<void()> on_change_;
  const std::function<void()> on_room_;
  const std::unique_ptr<LeaderClient> client_;

  mutable Mutex mutex_;
  CondVar idle_;  // watch_ has ended, or the last lease was returned
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<LeaderClient::Stream> watch_ ABSL_GUARDED_BY(mutex_);  // until OnWatchEnd()
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;  // watch_ was cancelled for its silence
  Clock::time_point last_heard_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point next_watch_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point not_ready_until_ ABSL_GUARDED_BY(mutex_);  // whatever this incarnation says
  std::chrono::milliseconds backoff_ ABSL_GUARDED_BY(mutex_);
  std::int64_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t prefill_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t num_placements_ ABSL_GUARDED_BY(mutex_) = 0;
  GroupWindow window_ ABSL_GUARDED_BY(mutex_);
  ServiceRate service_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::uint64_t, Call> calls_ ABSL_GUARDED_BY(mutex_);
  Breaker breaker_ ABSL_GUARDED_BY(mutex_);
  // Since when its share grows, and in which incarnation it was ready last.
  Clock::time_point warming_since_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::uint64_t> ready_epoch_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const GroupSnapshot> snapshot_ ABSL_GUARDED_BY(mutex_);
  PrefixIndex blocks_ ABSL_GUARDED_BY(mutex_);
};

// A request's place in a group: counts as load there until it is destroyed.
class GroupLease {
 public:
  GroupLease() = default;
  // `prefill_tokens`: what the group has to compute before the first token.
  GroupLease(std::shared_ptr<GroupLink> link, std::shared_ptr<const GroupSnapshot> snapshot,
             std::int64_t prefill_tokens);
  GroupLease(GroupLease&&) = default;
  GroupLease& operator=(GroupLease&& other) noexcept {
    std::swap(link_, other.link_);
    std::swap(load_, other.load_);
    std::swap(snapshot_, other.snapshot_);
    return *this;
  }

  // The first token is there. Once is enough.
  void FinishPrefill() {
    link_->FinishPrefill(std::exchange(load_.get_deleter().prefill_tokens, 0));
  }
  // How the request's stay ends, as the group's breaker sees it.
  void SetOutcome(GroupOutcome outcome) {
    load_.get_deleter().outcome = outcome;
    load_.get_deleter().epoch = snapshot_->epoch;
  }

  GroupLink& link() const { return *link_; }
  // The group when it was chosen.
  const GroupSnapshot& snapshot() const { return *snapshot_; }

 private:
  struct Leave {
    void operator()(GroupLink* link) const {
      link->FinishPrefill(prefill_tokens);
      link->Leave(outcome, epoch);
    }
    std::int64_t prefill_tokens = 0;
    GroupOutcome outcome = GroupOutcome::kNone;
    std::uint64_t epoch = 0;
  };
  std::shared_ptr<GroupLink> link_;
  std::unique_ptr<GroupLink, Leave> load_;  // destroyed before link_
  std::shared_ptr<const GroupSnapshot> snapshot_;
};

}  // namespace weft
