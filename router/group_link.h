#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "router/cluster_snapshot.h"
#include "router/leader_client.h"
#include "router/prefix_index.h"
#include "server/base/mutex.h"

namespace weft {

struct GroupLinkOptions {
  // A leader that says nothing for so long is taken for lost; it speaks every 500 ms.
  std::chrono::milliseconds heartbeat_timeout{3000};
  std::chrono::milliseconds min_backoff{100};
  std::chrono::milliseconds max_backoff{1000};
  bool watch_blocks = false;  // keeps an index of the group's prefix cache
  // How leaders are reached; required.
  std::function<std::unique_ptr<LeaderClient>(const std::string& address)> connect;
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// The router's end of one group: the wire to its leader, the WatchState stream that is opened
// again whenever it ends, and the calls that are under way there.
//
// Thread-safe. `on_change` and the handlers of calls run on the wire's threads or in Tick(), with
// no lock of this class held.
class GroupLink final : private LeaderClient::WatchHandler {
 public:
  using Clock = std::chrono::steady_clock;

  // `on_change` runs after every change of Snapshot().
  GroupLink(std::string address, const GroupLinkOptions& options, std::function<void()> on_change);
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
  // Requests of this router that hold a GroupLease.
  std::int64_t in_flight() const;
  // Tokens of prompts that those have still to compute.
  std::int64_t prefill_tokens() const;
  // How many of the first blocks of a prompt its prefix cache holds, as far as it has said.
  std::size_t CountCached(absl::Span<const BlockHash> blocks) const;
  // Blocks in the index of its prefix cache, and its memory.
  std::pair<std::size_t, std::size_t> IndexSize() const;
  // GroupLeases there have ever been.
  std::uint64_t num_placements() const;
  LeaderClient& client() { return *client_; }

  // Registers a call of the group's incarnation `epoch`; `on_lost` runs if the group is lost
  // before RemoveCall(). Nothing when that incarnation is gone already.
  std::optional<std::uint64_t> AddCall(std::uint64_t epoch, std::function<void()> on_lost);
  void RemoveCall(std::uint64_t id);

  // The leader refused a call as not ready or draining, or lost it: the group is taken for not
  // ready until it is heard of again. No on_change: nobody waits for that.
  void ReportNotReady(std::uint64_t epoch);

 private:
  friend class GroupLease;

  void Enter(std::int64_t prefill_tokens);
  void FinishPrefill(std::int64_t prefill_tokens);
  void Leave();
  void OnState(v1::GroupState state) override;
  void OnWatchEnd(const absl::Status& status) override;
  // Ends all calls with the group; `why` becomes the state shown to people.
  void Lose(std::string why);
  void Publish(GroupSnapshot snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string address_;
  const GroupLinkOptions options_;
  const std::function<void()> on_change_;
  const std::unique_ptr<LeaderClient> client_;

  mutable Mutex mutex_;
  CondVar idle_;  // watch_ has ended, or the last lease was returned
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<LeaderClient::Stream> watch_ ABSL_GUARDED_BY(mutex_);  // until OnWatchEnd()
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;  // watch_ was cancelled for its silence
  Clock::time_point last_heard_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point next_watch_ ABSL_GUARDED_BY(mutex_);
  std::chrono::milliseconds backoff_ ABSL_GUARDED_BY(mutex_);
  std::int64_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t prefill_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t num_placements_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::uint64_t, std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
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

  GroupLink& link() const { return *link_; }
  // The group when it was chosen.
  const GroupSnapshot& snapshot() const { return *snapshot_; }

 private:
  struct Leave {
    void operator()(GroupLink* link) const {
      link->FinishPrefill(prefill_tokens);
      link->Leave();
    }
    std::int64_t prefill_tokens = 0;
  };
  std::shared_ptr<GroupLink> link_;
  std::unique_ptr<GroupLink, Leave> load_;  // destroyed before link_
  std::shared_ptr<const GroupSnapshot> snapshot_;
};

}  // namespace weft
