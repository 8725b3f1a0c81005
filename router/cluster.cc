#include "router/cluster.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fmt/format.h"
#include "router/validate.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"

namespace weft {
namespace {

constexpr std::chrono::milliseconds kTick{50};

// Those that a group had taken come before all others.
std::int32_t QueuePriority(const PlaceRequest& request) {
  return request.admitted ? std::numeric_limits<std::int32_t>::min() : request.priority;
}

absl::Status Overloaded(std::string_view why) {
  return WithReason(absl::ResourceExhaustedError(std::string(why)), kReasonOverloaded);
}

}  // namespace

Cluster::Cluster(ClusterOptions options)
    : options_(std::move(options)),
      retry_budget_(options_.retry_budget),
      policy_(options_.policy, options_.request_tokens, std::random_device()()),
      prefill_policy_(options_.policy, options_.request_tokens, std::random_device()()) {
  SetGroups(options_.addresses);
  if (options_.ticks_itself) ticker_ = std::thread([this] { RunTicker(); });
}

Cluster::~Cluster() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  {
    MutexLock lock(ticker_mutex_);
    ticker_stops_ = true;
    wake_ticker_.NotifyAll();
  }
  if (ticker_.joinable()) ticker_.join();
  FailOverdue(Clock::time_point::max());
  SetGroups({});
  std::vector<std::shared_ptr<GroupLink>> links;
  {
    MutexLock lock(mutex_);
    links.swap(leaving_);
  }
  for (const auto& link : links) link->Shutdown();
}

void Cluster::SetGroups(const std::vector<std::string>& addresses) {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<GroupLink>> before = std::move(links_);
  before.insert(before.end(), leaving_.begin(), leaving_.end());
  links_.clear();
  leaving_.clear();
  for (const std::string& address : addresses) {
    const auto known = std::find_if(before.begin(), before.end(), [&](const auto& link) {
      return link != nullptr && link->address() == address;
    });
    if (known != before.end()) {
      links_.push_back(std::exchange(*known, nullptr));
    } else {
      links_.push_back(std::make_shared<GroupLink>(
          address, options_.link, [this] { OnChange(); }, [this] { OnRoom(); }));
    }
  }
  for (auto& link : before) {
    if (link != nullptr) leaving_.push_back(std::move(link));
  }
  PublishSnapshot();
}

void Cluster::DropLeaving() {
  std::vector<std::shared_ptr<GroupLink>> dropped;
  {
    MutexLock lock(mutex_);
    std::erase_if(leaving_, [&dropped](const auto& link) {
      if (link->Load().in_flight > 0) return false;
      dropped.push_back(link);
      return true;
    });
  }
  for (const auto& link : dropped) link->Shutdown();
}

void Cluster::PublishSnapshot() {
  ClusterSnapshot next;
  for (const auto& link : links_) next.groups.push_back(link->Snapshot());
  snapshot_ = std::make_shared<const ClusterSnapshot>(std::move(next));
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
  std::vector<Outcome> outcomes;
  bool waits = false;
  {
    MutexLock lock(mutex_);
    if (!request.retry && !request.admitted) retry_budget_.OnRequest(now());
    std::optional<absl::StatusOr<GroupLease>> result;
    // Who waits goes first.
    if (stopping_ || waiting_.empty()) result = TryPlace(request);
    if (!result) {
      Waiter waiter = {id, std::move(request), std::move(done)};
      if (absl::Status refused = Enqueue(waiter, outcomes); !refused.ok()) {
        done = std::move(waiter.done);
        result = std::move(refused);
      }
    }
    waits = !result;
    if (result) outcomes.push_back({std::move(done), *std::move(result)});
  }
  for (Outcome& outcome : outcomes) outcome.done(std::move(outcome.result));
  if (waits) PlaceWaiting();  // it may be the first, or the only one that fits
}

absl::Status Cluster::Enqueue(Waiter& waiter, std::vector<Outcome>& outcomes) {
  const PlaceRequest& request = waiter.request;
  const std::int32_t priority = QueuePriority(request);
  if (!request.admitted) {
    std::vector<LinkLoad> groups;
    for (const auto& link : links_) {
      if (const auto group = link->Snapshot(); group->TakesRequests()) {
        groups.push_back(link->Load());
      }
    }
    RETURN_IF_ERROR(CheckDeadline(request, waiting_.CountBefore(priority, request.tenant), groups));
    if (static_cast<std::int64_t>(waiting_.size()) >= options_.max_waiting) {
      std::optional<Waiter> last = waiting_.PopLastFor(
          priority, request.tenant, [](const Waiter& other) { return !other.request.admitted; });
      const std::string why =
          fmt::format("{} requests wait already (--max-queued-requests)", options_.max_waiting);
      if (!last) return Overloaded(why);
      outcomes.push_back({std::move(last->done), Overloaded(why + ", and others go first")});
    }
  }
  const std::int64_t tokens =
      request.prompt->num_tokens() + request.more_tokens +
      (request.max_tokens > 0 ? request.max_tokens : options_.request_tokens);
  const std::string tenant = request.tenant;
  waiting_.Push(priority, tenant, static_cast<double>(tokens), std::move(waiter));
  any_waiting_ = true;
  return absl::OkStatus();
}

absl::Status Cluster::CheckDeadline(const PlaceRequest& request, std::int64_t ahead,
                                    absl::Span<const LinkLoad> groups) const {
  if (request.deadline == std::chrono::system_clock::time_point::max() || groups.empty()) {
    return absl::OkStatus();
  }
  double per_second = 0;
  for (const LinkLoad& group : groups) {
    if (!group.served_per_second) return absl::OkStatus();
    ahead += group.waiting;
    per_second += *group.served_per_second;
  }
  const absl::Duration wait = absl::Seconds(static_cast<double>(ahead + 1) / per_second);
  const absl::Duration left = absl::FromChrono(request.deadline - options_.system_now());
  if (wait <= left) return absl::OkStatus();
  return WithRetryAfter(
      Overloaded(fmt::format(
          "{} requests wait already, of which {:.1f} are served in a second: the request's "
          "deadline in {} cannot be met",
          ahead, per_second, absl::FormatDuration(absl::Trunc(left, absl::Milliseconds(1))))),
      absl::Ceil(wait - left, absl::Milliseconds(1)));
}

bool Cluster::CancelPlace(WaitId id) {
  std::optional<Waiter> cancelled;  // its handler is destroyed without the lock
  MutexLock lock(mutex_);
  waiting_.Scan([&](Waiter& waiter) {
    if (cancelled) return Queue::Verdict::kStop;
    if (waiter.id != id) return Queue::Verdict::kKeep;
    cancelled = std::move(waiter);
    return Queue::Verdict::kRemove;
  });
  any_waiting_ = !waiting_.empty();
  return cancelled.has_value();
}

void Cluster::OnChange() {
  {
    MutexLock lock(mutex_);
    PublishSnapshot();
  }
  PlaceWaiting();
}

void Cluster::OnRoom() {
  if (!any_waiting_) return;
  MutexLock lock(ticker_mutex_);
  if (std::exchange(has_room_, true)) return;
  wake_ticker_.NotifyAll();
}

bool Cluster::HasRoom(const GroupLink* except) const {
  return std::any_of(links_.begin(), links_.end(), [except](const auto& link) {
    const auto group = link->Snapshot();
    return link.get() != except && group->TakesRequests() && !link->Load().full;
  });
}

void Cluster::PlaceWaiting() {
  std::vector<Outcome> outcomes;
  {
    MutexLock lock(mutex_);
    bool has_room = !waiting_.empty() && HasRoom();
    waiting_.Scan([&](Waiter& waiter) {
      if (!has_room) return Queue::Verdict::kStop;
      std::optional<absl::StatusOr<GroupLease>> result = TryPlace(waiter.request);
      if (!result) return Queue::Verdict::kKeep;
      const bool placed = result->ok();
      outcomes.push_back({std::move(waiter.done), *std::move(result)});
      has_room = HasRoom();
      return placed ? Queue::Verdict::kServed : Queue::Verdict::kRemove;
    });
    any_waiting_ = !waiting_.empty();
  }
  for (Outcome& outcome : outcomes) outcome.done(std::move(outcome.result));
}

void Cluster::Tick(Clock::time_point now) {
  std::vector<std::shared_ptr<GroupLink>> links = this->links();
  {
    MutexLock lock(mutex_);
    links.insert(links.end(), leaving_.begin(), leaving_.end());
  }
  for (const auto& link : links) link->Tick(now);
  DropLeaving();
  FailOverdue(now);
  PlaceWaiting();
}

void Cluster::RunTicker() {
  Clock::time_point next_tick = now();
  while (true) {
    if (const Clock::time_point now = this->now(); now >= next_tick) {
      Tick(now);
      next_tick = now + kTick;
    } else {
      PlaceWaiting();
    }
    MutexLock lock(ticker_mutex_);
    while (!ticker_stops_ && !has_room_ && wake_ticker_.WaitUntil(ticker_mutex_, next_tick)) {
    }
    has_room_ = false;
    if (ticker_stops_) return;
  }
}

absl::Status Cluster::WaitedTooLong() const {
  std::string states;
  bool ready = false;
  for (const auto& group : snapshot_->groups) {
    ready |= group->TakesRequests();
    states +=
        fmt::format("{}{}: {}", states.empty() ? "" : "; ", group->info.address(), group->state);
  }
  if (ready) {
    return Overloaded(fmt::format("no group took the request within {} ms: all are full",
                                  options_.queue_timeout.count()));
  }
  return WithReason(absl::UnavailableError(fmt::format("no group became ready within {} ms ({})",
                                                       options_.queue_timeout.count(), states)),
                    kReasonNotReady);
}

void Cluster::FailOverdue(Clock::time_point now) {
  std::vector<Outcome> outcomes;
  {
    MutexLock lock(mutex_);
    waiting_.Scan([&](Waiter& waiter) {
      if (now - options_.queue_timeout < waiter.request.since) return Queue::Verdict::kKeep;
      outcomes.push_back({std::move(waiter.done), WaitedTooLong()});
      return Queue::Verdict::kRemove;
    });
    any_waiting_ = !waiting_.empty();
  }
  for (Outcome& outcome : outcomes) outcome.done(std::move(outcome.result));
}

GroupLoad Cluster::LoadOf(const GroupSnapshot& group, const GroupLink& link, const LinkLoad& load,
                          const PromptBlocks& prompt) const {
  return {.ready = group.ready && !load.full,
          .max_prompt_tokens = group.info.max_model_len() - 1,
          .requests = group.other_requests + load.in_flight,
          .free_blocks = group.info.num_free_blocks(),
          .cached_tokens = group.info.block_size() * static_cast<std::int64_t>(link.CountCached(
                                                         prompt.Find(group.block_hash_key))),
          .prefill_tokens = load.prefill_tokens,
          .weight = load.weight};
}

void Cluster::WarnOfMismatch(const GroupLink& link, const GroupSnapshot& prefill,
                             const GroupLease& decode) {
  const std::string warning = fmt::format(
      "{} computes no prompts for {}, which computes them itself: its KV is {}, that of the other "
      "{}",
      link.address(), decode.link().address(), prefill.kv->format(),
      decode.snapshot().kv->format());
  if (mismatches_.Allows(warning, now())) spdlog::warn("{}", warning);
}

std::optional<GroupLease> Cluster::PlacePrefill(const GroupLease& decode,
                                                const PlaceRequest& request) {
  if (!decode.snapshot().kv.has_value()) return std::nullopt;
  const std::int64_t prompt_tokens = request.prompt->num_tokens() + request.more_tokens;
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<const GroupSnapshot>> groups(links_.size());
  std::vector<GroupLoad> loads(links_.size());
  std::optional<std::size_t> mismatch;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    groups[i] = links_[i]->Snapshot();
    const GroupSnapshot& group = *groups[i];
    const LinkLoad load = links_[i]->Load();
    loads[i] = LoadOf(group, *links_[i], load, *request.prompt);
    loads[i].ready &= !load.broken && group.Prefills() && links_[i].get() != &decode.link() &&
                      group.kv.has_value();
    if (loads[i].ready && group.kv->format() != decode.snapshot().kv->format()) {
      loads[i].ready = false;
      mismatch = i;
    }
  }
  const auto chosen = prefill_policy_.Pick(loads, prompt_tokens);
  if (!chosen) {
    if (mismatch) WarnOfMismatch(*links_[*mismatch], *groups[*mismatch], decode);
    return std::nullopt;
  }
  return GroupLease(links_[*chosen], std::move(groups[*chosen]),
                    prompt_tokens - loads[*chosen].cached_tokens);
}

std::optional<absl::StatusOr<GroupLease>> Cluster::TryPlace(const PlaceRequest& request) {
  if (stopping_) return WithReason(absl::UnavailableError("the router stops"), kReasonDraining);
  const std::int64_t prompt_tokens = request.prompt->num_tokens() + request.more_tokens;
  std::vector<std::shared_ptr<const GroupSnapshot>> groups(links_.size());
  std::vector<GroupLoad> loads(links_.size());
  std::vector<LinkLoad> of_ready;
  std::vector<bool> shunned(links_.size());  // only if there is no other
  bool all_shunned = true;
  std::int64_t longest_model_len = 0;  // of the ready ones
  for (std::size_t i = 0; i < links_.size(); ++i) {
    groups[i] = links_[i]->Snapshot();  // snapshot_ may be a moment behind
    const GroupSnapshot& group = *groups[i];
    const LinkLoad load = links_[i]->Load();
    loads[i] = LoadOf(group, *links_[i], load, *request.prompt);
    loads[i].ready &= group.Decodes();
    if (!group.TakesRequests()) continue;
    of_ready.push_back(load);
    longest_model_len = std::max<std::int64_t>(longest_model_len, group.info.max_model_len());
    shunned[i] = load.broken || links_[i].get() == request.avoid;
    all_shunned &= shunned[i] || loads[i].max_prompt_tokens < prompt_tokens;
  }
  if (of_ready.empty()) return std::nullopt;
  double most = 0;  // weights are beside each other's
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (shunned[i] && !all_shunned) loads[i].ready = false;
    if (loads[i].ready) most = std::max(most, loads[i].weight);
  }
  for (GroupLoad& load : loads) load.weight = load.ready ? load.weight / most : 1;
  const auto chosen = policy_.Pick(loads, prompt_tokens);
  if (!chosen) {
    // What a group had taken waits for one that it fits.
    const absl::Status fits = ValidatePromptLength(prompt_tokens, longest_model_len);
    if (fits.ok() || request.admitted) return std::nullopt;
    return fits;
  }
  if (!request.admitted) {
    if (absl::Status status = CheckDeadline(request, 0, of_ready); !status.ok()) return status;
  }
  if (request.retry) {
    if (!retry_budget_.CanRetry(now())) return std::nullopt;
    retry_budget_.OnRetry(now());
  }
  const std::int64_t cached = loads[*chosen].cached_tokens;
  placed_.prompt_tokens += static_cast<std::uint64_t>(prompt_tokens);
  placed_.cached_tokens += static_cast<std::uint64_t>(cached);
  return GroupLease(links_[*chosen], std::move(groups[*chosen]), prompt_tokens - cached);
}

}  // namespace weft
