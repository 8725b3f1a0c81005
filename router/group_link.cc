#include "router/group_link.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/log.h"

namespace weft {

GroupLink::GroupLink(std::string address, const GroupLinkOptions& options,
                     std::function<void()> on_change, std::function<void()> on_room)
    : address_(std::move(address)),
      options_(options),
      on_change_(std::move(on_change)),
      on_room_(std::move(on_room)),
      client_(options.connect(address_)),
      backoff_(options.min_backoff),
      window_(options.min_retry_backoff, options.max_retry_backoff),
      breaker_(options.breaker) {
  GroupSnapshot first;
  first.state = "connecting";
  first.info.set_address(address_);
  snapshot_ = std::make_shared<const GroupSnapshot>(std::move(first));
}

GroupLink::~GroupLink() { CHECK(shut_down_ && watch_ == nullptr); }

void GroupLink::Tick(Clock::time_point now) {
  std::shared_ptr<LeaderClient::Stream> fresh;
  std::vector<std::function<void()>> late;
  {
    MutexLock lock(mutex_);
    if (shut_down_) return;
    if (options_.first_token_timeout > std::chrono::milliseconds(0)) FindLate(now, late);
    if (window_.Grow(in_flight_, now)) on_room_();
    if (watch_ == nullptr && now >= next_watch_) {
      fresh = watch_ = client_->WatchState(*this, options_.watch_blocks);
      silent_ = false;
      last_heard_ = now;
    } else if (watch_ != nullptr && !silent_ && now - last_heard_ > options_.heartbeat_timeout) {
      silent_ = true;
      watch_->Cancel();  // OnWatchEnd() follows at once: cancelling does not wait for the leader
    }
  }
  if (fresh != nullptr) fresh->Start();
  for (const auto& on_late : late) on_late();
}

void GroupLink::FindLate(Clock::time_point now, std::vector<std::function<void()>>& late) {
  for (auto& [id, call] : calls_) {
    if (now < call.late_at) continue;
    late.push_back(call.on_late);
    call.late_at = now + options_.first_token_timeout;  // whoever has to stay is asked again
  }
}

void GroupLink::Shutdown() {
  {
    MutexLock lock(mutex_);
    shut_down_ = true;
    if (watch_ != nullptr) watch_->Cancel();
    while (watch_ != nullptr) idle_.Wait(mutex_);
  }
  Lose("shut down");
  MutexLock lock(mutex_);
  while (in_flight_ > 0) idle_.Wait(mutex_);
}

LinkLoad GroupLink::Load() {
  MutexLock lock(mutex_);
  const Clock::time_point now = options_.now();
  LinkLoad load = {.in_flight = in_flight_, .prefill_tokens = prefill_tokens_, .full = IsFull()};
  const std::int64_t running = snapshot_->info.max_num_seqs();
  if (running > 0) load.waiting = std::max<std::int64_t>(0, in_flight_ - running);
  if (load.full || (running > 0 && in_flight_ >= running)) {
    load.served_per_second = service_.PerSecond(now);
  }
  load.breaker_open = breaker_.open();
  load.broken = !breaker_.Allows(now);
  if (const auto warm = now - warming_since_; warm < options_.slow_start) {
    constexpr double kMinWeight = 0.1;
    load.weight =
        std::max(kMinWeight, std::chrono::duration<double>(warm).count() /
                                 std::chrono::duration<double>(options_.slow_start).count());
  }
  return load;
}

bool GroupLink::IsFull() const {
  if (!window_.Open(in_flight_)) return true;
  const v1::GroupInfo& info = snapshot_->info;
  if (info.max_num_seqs() == 0) return false;  // it did not say
  return in_flight_ >=
         info.max_num_seqs() + std::min<std::int64_t>(info.max_num_waiting(), options_.max_waiting);
}

void GroupLink::ReportOverloaded() {
  MutexLock lock(mutex_);
  window_.OnOverload(in_flight_ - 1, options_.now());
}

std::size_t GroupLink::CountCached(absl::Span<const BlockHash> blocks) const {
  MutexLock lock(mutex_);
  return blocks_.CountCached(blocks);
}

std::pair<std::size_t, std::size_t> GroupLink::IndexSize() const {
  MutexLock lock(mutex_);
  return {blocks_.size(), blocks_.bytes()};
}

std::uint64_t GroupLink::num_placements() const {
  MutexLock lock(mutex_);
  return num_placements_;
}

void GroupLink::Enter(std::int64_t prefill_tokens) {
  MutexLock lock(mutex_);
  ++in_flight_;
  ++num_placements_;
  prefill_tokens_ += prefill_tokens;
  const std::int64_t running = snapshot_->info.max_num_seqs();
  const Clock::time_point now = options_.now();
  service_.OnStart(in_flight_, IsFull() || (running > 0 && in_flight_ > running), now);
  breaker_.OnStart(now);
}

void GroupLink::FinishPrefill(std::int64_t prefill_tokens) {
  if (prefill_tokens == 0) return;
  MutexLock lock(mutex_);
  prefill_tokens_ -= prefill_tokens;
}

void GroupLink::Leave(GroupOutcome outcome, std::uint64_t epoch) {
  bool opens = false;
  const std::string address = address_;  // this may be gone once nothing is in flight
  {
    MutexLock lock(mutex_);
    --in_flight_;
    const Clock::time_point now = options_.now();
    service_.OnEnd(in_flight_, outcome == GroupOutcome::kServed, now);
    const bool was_open = breaker_.open();
    if (breaker_.OnEnd(outcome, epoch, now)) warming_since_ = now;
    opens = !was_open && breaker_.open();
    on_room_();
    if (in_flight_ == 0) idle_.NotifyAll();
  }
  if (opens) spdlog::warn("group {}: fails too often; others are asked before it", address);
}

std::shared_ptr<const GroupSnapshot> GroupLink::Snapshot() const {
  MutexLock lock(mutex_);
  return snapshot_;
}

std::optional<std::uint64_t> GroupLink::AddCall(std::uint64_t epoch, std::function<void()> on_lost,
                                                std::function<void()> on_late) {
  MutexLock lock(mutex_);
  if (snapshot_->epoch != epoch || shut_down_) return std::nullopt;
  const std::uint64_t id = next_call_++;
  calls_.emplace(id, Call{std::move(on_lost), std::move(on_late),
                          options_.now() + options_.first_token_timeout});
  return id;
}

void GroupLink::AnswerCall(std::uint64_t id) {
  if (options_.first_token_timeout == std::chrono::milliseconds(0)) return;
  MutexLock lock(mutex_);
  if (const auto call = calls_.find(id); call != calls_.end()) {
    call->second.late_at = Clock::time_point::max();
  }
}

void GroupLink::RemoveCall(std::uint64_t id) {
  MutexLock lock(mutex_);
  calls_.erase(id);
}

void GroupLink::ReportNotReady(std::uint64_t epoch) {
  MutexLock lock(mutex_);
  if (snapshot_->epoch != epoch) return;
  not_ready_until_ = options_.now() + options_.min_backoff;
  if (!snapshot_->ready) return;
  GroupSnapshot next = *snapshot_;
  next.ready = false;
  next.state = "refuses requests";
  Publish(std::move(next));
}

void GroupLink::OnState(v1::GroupState state) {
  bool changed = false;
  bool gap = false;
  {
    MutexLock lock(mutex_);
    if (shut_down_) return;
    if (state.has_block_changes()) gap = !blocks_.Apply(state.block_changes());
    last_heard_ = options_.now();
    backoff_ = options_.min_backoff;
    GroupSnapshot next;
    next.epoch = snapshot_->epoch;
    next.info = std::move(*state.mutable_group());
    next.ready = next.info.ready() && last_heard_ >= not_ready_until_;
    next.state = next.info.ready() && !next.ready ? snapshot_->state : next.info.state();
    next.vocab_size = state.vocab_size();
    next.block_hash_key = std::move(*state.mutable_block_hash_key());
    if (state.has_kv()) next.kv = std::move(*state.mutable_kv());
    next.eos_token_ids.assign(state.eos_token_ids().begin(), state.eos_token_ids().end());
    next.other_requests =
        std::max<std::int64_t>(0, std::int64_t{next.info.num_requests_running()} +
                                      next.info.num_requests_waiting() - in_flight_);
    changed = next.state != snapshot_->state;
    if (next.ready && ready_epoch_ != next.epoch) {
      ready_epoch_ = next.epoch;
      warming_since_ = last_heard_;
    }
    Publish(std::move(next));
  }
  if (changed) spdlog::info("group {}: {}", address_, Snapshot()->state);
  if (gap) spdlog::warn("group {}: a gap in what it says of its prefix cache", address_);
  on_change_();
}

void GroupLink::OnWatchEnd(const absl::Status& status) {
  bool silent = false;
  {
    MutexLock lock(mutex_);
    silent = silent_;
  }
  const std::string why =
      status.ok() ? "the leader closed its state stream" : std::string(status.message());
  Lose(silent ? fmt::format("unreachable: silent for {} ms", options_.heartbeat_timeout.count())
              : fmt::format("unreachable: {}", why));
  MutexLock lock(mutex_);
  next_watch_ = options_.now() + backoff_;
  backoff_ = std::min(backoff_ * 2, options_.max_backoff);
  watch_ = nullptr;
  idle_.NotifyAll();
}

void GroupLink::Lose(std::string why) {
  absl::flat_hash_map<std::uint64_t, Call> calls;
  bool lost_in_service = false;
  bool first_loss = false;
  {
    MutexLock lock(mutex_);
    lost_in_service = snapshot_->ready && !shut_down_;
    first_loss = snapshot_->epoch == 0 && !shut_down_;
    GroupSnapshot next = *snapshot_;
    next.ready = false;
    next.state = why;
    ++next.epoch;
    Publish(std::move(next));
    blocks_.Clear();
    window_ = GroupWindow(options_.min_retry_backoff, options_.max_retry_backoff);
    calls.swap(calls_);
  }
  if (lost_in_service) {
    spdlog::warn("group {}: {}; {} requests end", address_, why, calls.size());
  } else if (first_loss) {
    spdlog::info("group {}: {}; asked again until it answers", address_, why);
  }
  for (const auto& [id, call] : calls) call.on_lost();
  on_change_();
}

void GroupLink::Publish(GroupSnapshot snapshot) {
  snapshot.info.set_address(address_);
  snapshot.info.set_ready(snapshot.ready);
  snapshot.info.set_state(snapshot.state);
  snapshot_ = std::make_shared<const GroupSnapshot>(std::move(snapshot));
}

GroupLease::GroupLease(std::shared_ptr<GroupLink> link,
                       std::shared_ptr<const GroupSnapshot> snapshot, std::int64_t prefill_tokens)
    : link_(std::move(link)), load_(link_.get(), {prefill_tokens}), snapshot_(std::move(snapshot)) {
  link_->Enter(prefill_tokens);
}

}  // namespace weft
