#include "router/cluster.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "router/validate.h"
#include "server/base/log.h"
#include "server/error_reason.h"

namespace weft {
namespace {

constexpr std::chrono::milliseconds kTick{50};

}  // namespace

Cluster::Cluster(ClusterOptions options)
    : options_(std::move(options)),
      policy_(options_.policy, options_.request_tokens, std::random_device()()),
      prefill_policy_(options_.policy, options_.request_tokens, std::random_device()()) {
  ClusterSnapshot snapshot;
  for (std::size_t i = 0; i < options_.addresses.size(); ++i) {
    links_.push_back(std::make_shared<GroupLink>(options_.addresses[i], options_.link,
                                                 [this, i] { OnChange(i); }));
    snapshot.groups.push_back(links_.back()->Snapshot());
  }
  snapshot_ = std::make_shared<const ClusterSnapshot>(std::move(snapshot));
  if (options_.ticks_itself) ticker_ = std::thread([this] { RunTicker(); });
}

Cluster::~Cluster() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_ticker_.NotifyAll();
  }
  if (ticker_.joinable()) ticker_.join();
  FailOverdue(Clock::time_point::max());
  for (const auto& link : links_) link->Shutdown();
}

std::shared_ptr<const ClusterSnapshot> Cluster::Snapshot() const {
  MutexLock lock(mutex_);
  return snapshot_;
}

Cluster::WaitId Cluster::NewWait() { return WaitId{next_wait_++}; }

void Cluster::Place(WaitId id, PlaceRequest request, PlaceHandler done) {
  if (options_.policy == RoutingPolicy::kPrefixAware) {
    // Before the lock, for it takes its time.
    const auto snapshot = Snapshot();
    for (const auto& group : snapshot->groups) {
      if (group->block_hash_key.empty()) continue;
      request.prompt->Hash(group->block_hash_key, group->info.block_size());
    }
  }
  absl::StatusOr<GroupLease> result;
  {
    MutexLock lock(mutex_);
    result = TryPlace(request);
    if (absl::IsUnavailable(result.status()) && !stopping_) {
      if (request.admitted || static_cast<std::int64_t>(waiting_.size()) < options_.max_waiting) {
        waiting_.push_back({id, std::move(request), options_.link.now() + options_.queue_timeout,
                            std::move(done)});
        return;
      }
      result =
          WithReason(absl::ResourceExhaustedError(fmt::format(
                         "no group is ready and {} requests wait already (--max-queued-requests)",
                         waiting_.size())),
                     kReasonOverloaded);
    }
  }
  done(std::move(result));
}

bool Cluster::CancelPlace(WaitId id) {
  Waiter cancelled;  // its handler is destroyed without the lock
  MutexLock lock(mutex_);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                               [id](const Waiter& waiter) { return waiter.id == id; });
  if (it == waiting_.end()) return false;
  cancelled = std::move(*it);
  waiting_.erase(it);
  return true;
}

void Cluster::OnChange(std::size_t index) {
  std::vector<Outcome> outcomes;
  {
    MutexLock lock(mutex_);
    ClusterSnapshot next = *snapshot_;
    next.groups[index] = links_[index]->Snapshot();
    snapshot_ = std::make_shared<const ClusterSnapshot>(std::move(next));
    while (!waiting_.empty()) {
      absl::StatusOr<GroupLease> result = TryPlace(waiting_.front().request);
      if (absl::IsUnavailable(result.status())) break;
      outcomes.push_back({std::move(waiting_.front().done), std::move(result)});
      waiting_.pop_front();
    }
  }
  for (Outcome& outcome : outcomes) outcome.done(std::move(outcome.result));
}

void Cluster::Tick(Clock::time_point now) {
  for (const auto& link : links_) link->Tick(now);
  FailOverdue(now);
}

void Cluster::RunTicker() {
  while (true) {
    const Clock::time_point now = options_.link.now();
    Tick(now);
    MutexLock lock(mutex_);
    if (!stopping_) wake_ticker_.WaitUntil(mutex_, now + kTick);
    if (stopping_) return;
  }
}

void Cluster::FailOverdue(Clock::time_point now) {
  std::vector<Waiter> overdue;
  std::string states;
  {
    MutexLock lock(mutex_);
    while (!waiting_.empty() && waiting_.front().deadline <= now) {
      overdue.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (overdue.empty()) return;
    for (const auto& group : snapshot_->groups) {
      states +=
          fmt::format("{}{}: {}", states.empty() ? "" : "; ", group->info.address(), group->state);
    }
  }
  for (Waiter& waiter : overdue) {
    waiter.done(
        WithReason(absl::UnavailableError(fmt::format("no group became ready within {} ms ({})",
                                                      options_.queue_timeout.count(), states)),
                   kReasonNotReady));
  }
}

GroupLoad Cluster::LoadOf(std::size_t index, const GroupSnapshot& group,
                          const PromptBlocks& prompt) const {
  const GroupLink& link = *links_[index];
  return {.ready = group.ready,
          .max_prompt_tokens = group.info.max_model_len() - 1,
          .requests = group.other_requests + link.in_flight(),
          .free_blocks = group.info.num_free_blocks(),
          .cached_tokens = group.info.block_size() * static_cast<std::int64_t>(link.CountCached(
                                                         prompt.Find(group.block_hash_key))),
          .prefill_tokens = link.prefill_tokens()};
}

void Cluster::WarnOfMismatch(const GroupLink& link, const GroupSnapshot& prefill,
                             const GroupLease& decode) {
  std::string warning = fmt::format(
      "{} computes no prompts for {}, which computes them itself: its KV is {}, that of the other "
      "{}",
      link.address(), decode.link().address(), prefill.kv->format(),
      decode.snapshot().kv->format());
  if (warning == last_mismatch_) return;
  spdlog::warn("{}", warning);
  last_mismatch_ = std::move(warning);
}

std::optional<GroupLease> Cluster::PlacePrefill(const GroupLease& decode,
                                                const PlaceRequest& request) {
  if (!decode.snapshot().kv.has_value()) return std::nullopt;
  const std::int64_t prompt_tokens = request.prompt->num_tokens() + request.more_tokens;
  std::vector<std::shared_ptr<const GroupSnapshot>> groups(links_.size());
  std::vector<GroupLoad> loads(links_.size());
  std::optional<std::size_t> mismatch;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    groups[i] = links_[i]->Snapshot();
    const GroupSnapshot& group = *groups[i];
    loads[i] = LoadOf(i, group, *request.prompt);
    loads[i].ready = group.ready && group.Prefills() && links_[i].get() != &decode.link() &&
                     group.kv.has_value();
    if (loads[i].ready && group.kv->format() != decode.snapshot().kv->format()) {
      loads[i].ready = false;
      mismatch = i;
    }
  }
  MutexLock lock(mutex_);
  const auto chosen = prefill_policy_.Pick(loads, prompt_tokens);
  if (!chosen) {
    if (mismatch) WarnOfMismatch(*links_[*mismatch], *groups[*mismatch], decode);
    return std::nullopt;
  }
  return GroupLease(links_[*chosen], std::move(groups[*chosen]),
                    prompt_tokens - loads[*chosen].cached_tokens);
}

absl::StatusOr<GroupLease> Cluster::TryPlace(const PlaceRequest& request) {
  if (stopping_) return WithReason(absl::UnavailableError("the router stops"), kReasonDraining);
  const std::int64_t prompt_tokens = request.prompt->num_tokens() + request.more_tokens;
  std::vector<std::shared_ptr<const GroupSnapshot>> groups(links_.size());
  std::vector<GroupLoad> loads(links_.size());
  std::optional<std::int64_t> longest_model_len;  // of the ready ones
  for (std::size_t i = 0; i < links_.size(); ++i) {
    groups[i] = links_[i]->Snapshot();  // snapshot_ may be a moment behind
    const GroupSnapshot& group = *groups[i];
    loads[i] = LoadOf(i, group, *request.prompt);
    loads[i].ready = group.ready && group.Decodes();
    if (loads[i].ready) {
      longest_model_len =
          std::max<std::int64_t>(longest_model_len.value_or(0), group.info.max_model_len());
    }
  }
  if (const auto chosen = policy_.Pick(loads, prompt_tokens)) {
    const std::int64_t cached = loads[*chosen].cached_tokens;
    placed_.prompt_tokens += static_cast<std::uint64_t>(prompt_tokens);
    placed_.cached_tokens += static_cast<std::uint64_t>(cached);
    return GroupLease(links_[*chosen], std::move(groups[*chosen]), prompt_tokens - cached);
  }
  // What a group had taken waits for one that it fits.
  if (longest_model_len && !request.admitted) {
    return ValidatePromptLength(prompt_tokens, *longest_model_len);
  }
  return WithReason(absl::UnavailableError("no group is ready"), kReasonNotReady);
}

}  // namespace weft
