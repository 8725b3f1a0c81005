#include "worker/leader.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"

namespace weft {
namespace {

// Wakes are explicit; this only bounds what a lost one could cost.
constexpr absl::Duration kIdleWait = absl::Seconds(1);

}  // namespace

Leader::Leader(std::unique_ptr<Engine> engine, std::int32_t max_num_waiting, LeaderMetrics* metrics)
    : engine_(std::move(engine)),
      metrics_(metrics),
      block_log_(engine_->options().num_blocks),
      // A burst waits here until the engine has looked at it, which may still refuse it.
      inbox_(static_cast<std::size_t>(max_num_waiting) + 1024) {
  stats_ = engine_->Stats();
  engine_thread_ = std::thread([this] { EngineLoop(); });
}

Leader::~Leader() {
  Stop();
  engine_thread_.join();
}

absl::StatusOr<RequestId> Leader::Submit(EngineRequest request, std::shared_ptr<TokenSink> sink) {
  RETURN_IF_ERROR(CheckRequest(request, engine_->options()));
  HashPrompt(request, engine_->options());
  const RequestId id{next_id_.fetch_add(1, std::memory_order_relaxed)};
  request.id = id;
  num_requests_.fetch_add(1, std::memory_order_relaxed);
  if (!inbox_.TryPush({.id = id,
                       .request = std::move(request),
                       .sink = std::move(sink),
                       .arrival = absl::Now()})) {
    num_requests_.fetch_sub(1, std::memory_order_relaxed);
    return WithReason(absl::ResourceExhaustedError(
                          fmt::format("{} messages wait for the engine", inbox_.capacity())),
                      kReasonOverloaded);
  }
  return id;
}

void Leader::Cancel(RequestId id) {
  {
    MutexLock lock(mutex_);
    cancelled_.push_back(id);
  }
  inbox_.Wake();
}

void Leader::ContinueKv(RequestId id, std::optional<std::int32_t> first_token,
                        std::string failure) {
  {
    MutexLock lock(mutex_);
    kv_continuations_.push_back({id, first_token, std::move(failure)});
  }
  inbox_.Wake();
}

void Leader::OnKvReport(KvReport report) {
  {
    MutexLock lock(mutex_);
    kv_reports_.push_back(std::move(report));
  }
  inbox_.Wake();
}

void Leader::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  inbox_.Wake();
}

EngineStats Leader::Stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

std::vector<std::int64_t> Leader::KvLengths() const {
  MutexLock lock(mutex_);
  return kv_lengths_;
}

void Leader::HandleInbox(std::vector<Message>& inbox) {
  std::vector<RequestId> cancelled;
  std::vector<KvContinuation> continuations;
  std::vector<KvReport> reports;
  {
    MutexLock lock(mutex_);
    cancelled.swap(cancelled_);
    continuations.swap(kv_continuations_);
    reports.swap(kv_reports_);
  }
  // Only now: a request is handed over before anyone can cancel it, so those of above are among
  // the ones that are known then.
  inbox_.Drain(inbox);
  const absl::Time now = absl::Now();
  for (Message& message : inbox) {
    const RequestTimes times = {
        .arrival = message.arrival,
        .num_prompt_tokens = static_cast<std::int32_t>(message.request.prompt_token_ids.size())};
    const absl::Status added = engine_->Add(std::move(message.request), now);
    if (added.ok()) {
      active_.emplace(message.id, Active{.sink = std::move(message.sink), .times = times});
    } else {
      num_requests_.fetch_sub(1, std::memory_order_relaxed);
      message.sink->OnRefused(added.code() == absl::StatusCode::kResourceExhausted
                                  ? WithReason(added, kReasonOverloaded)
                                  : added);
    }
  }
  for (const KvReport& report : reports) engine_->OnKvReport(report);
  for (KvContinuation& next : continuations) {
    engine_->ContinueKv(next.id, next.first_token, std::move(next.failure));
  }
  for (RequestId id : cancelled) engine_->Cancel(id);
}

std::optional<StepResult> Leader::TakeResult() {
  MutexLock lock(mutex_);
  if (results_taken_ == executed_) return std::nullopt;
  Result& result = results_[results_taken_ % 2];
  ++results_taken_;
  return StepResult{.step = result.step,
                    .token_ids = result.token_ids,
                    .logprobs = absl::MakeSpan(result.logprobs)};
}

void Leader::DeliverEvents() {
  const absl::Time now = absl::Now();
  for (const TokenEvent& event : engine_->TakeEvents()) {
    const auto request = active_.find(event.id);
    if (request == active_.end()) continue;
    const bool ended = event.finish != FinishReason::kNone;
    if (metrics_ != nullptr) {  // before the sink: who has seen an end finds it counted
      RequestTimes& times = request->second.times;
      if (event.kv_took.has_value()) metrics_->OnKvTransfer(*event.kv_took);
      if (event.token_id.has_value()) metrics_->OnToken(times, event.output_index, now);
      if (ended) metrics_->OnEnd(times, event.admitted, event.finish, now);
    }
    request->second.sink->OnEvent(event);
    if (ended) {
      active_.erase(request);
      num_requests_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

bool Leader::PlanStep() {
  const std::optional<StepResult> result = TakeResult();
  const StepPlan* plan = engine_->Step(absl::Now(), result);
  engine_->GetKvLengths(next_kv_lengths_);
  block_log_.Append(engine_->TakeBlockChanges());
  std::uint64_t next = 0;
  {
    MutexLock lock(mutex_);
    kv_lengths_.swap(next_kv_lengths_);
    stats_ = engine_->Stats();  // before the events: who has seen an end sees its blocks free
    next = planned_;
  }
  DeliverEvents();
  if (plan == nullptr) return result.has_value();
  if (metrics_ != nullptr) metrics_->OnStep(static_cast<std::int32_t>(plan->token_ids.size()));
  plans_[next % 2] = *plan;
  {
    MutexLock lock(mutex_);
    ++planned_;
  }
  changed_.NotifyAll();
  return true;
}

void Leader::EngineLoop() {
  std::vector<Message> inbox;
  // Who asks for something is heard between any two steps, however short they are.
  for (bool more = false;;) {
    const absl::Duration until_deadline = engine_->NextDeadline() - absl::Now();
    inbox_.WaitFor(more ? absl::ZeroDuration()
                        : std::clamp(until_deadline, absl::ZeroDuration(), kIdleWait));
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    HandleInbox(inbox);
    inbox.clear();
    more = PlanStep();
  }
}

absl::Status Leader::RunExecutor(Rank& rank) {
  for (std::uint64_t step = 0;; ++step) {
    {
      MutexLock lock(mutex_);
      while (planned_ == step && !stopping_) changed_.Wait(mutex_);
      if (stopping_) return absl::OkStatus();
    }
    const StepPlan& plan = plans_[step % 2];
    ASSIGN_OR_RETURN(const StepOutput output, rank.RunStep(plan));
    Result& result = results_[step % 2];
    result.step = plan.step;
    result.token_ids.assign(output.token_ids.begin(), output.token_ids.end());
    result.logprobs.assign(std::make_move_iterator(output.logprobs.begin()),
                           std::make_move_iterator(output.logprobs.end()));
    {
      MutexLock lock(mutex_);
      ++executed_;
    }
    inbox_.Wake();
  }
}

}  // namespace weft
