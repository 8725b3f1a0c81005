#include "worker/engine/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/engine/scheduler.h"
#include "worker/engine/sequence.h"

namespace weft {
namespace {

absl::Status CheckOptions(const EngineOptions& options) {
  struct Limit {
    std::string_view name;
    std::int64_t seen, min;
  };
  const Limit limits[] = {{"block_size", options.block_size, 1},
                          {"num_blocks", options.num_blocks, 1},
                          {"max_model_len", options.max_model_len, 2},
                          {"max_num_seqs", options.max_num_seqs, 1},
                          {"max_num_batched_tokens", options.max_num_batched_tokens, 1},
                          {"max_num_waiting", options.max_num_waiting, 1},
                          {"vocab_size", options.vocab_size, 1},
                          {"force_preemption_every", options.force_preemption_every, 0}};
  for (const Limit& limit : limits) {
    if (limit.seen < limit.min) {
      return absl::InvalidArgumentError(
          fmt::format("{} is {}; allowed is {} and above", limit.name, limit.seen, limit.min));
    }
  }
  const std::int64_t capacity = std::int64_t{options.num_blocks} * options.block_size;
  if (options.max_model_len > capacity) {
    return absl::InvalidArgumentError(
        fmt::format("max_model_len is {}; {} blocks of {} tokens hold one sequence of at most {}",
                    options.max_model_len, options.num_blocks, options.block_size, capacity));
  }
  return absl::OkStatus();
}

std::unique_ptr<KvHandoff> MakeHandoff(const EngineRequest& request) {
  if (request.kv_transfer == 0) return nullptr;
  auto kv = std::make_unique<KvHandoff>();
  kv->sends = request.kv_target != nullptr;
  kv->transfer = request.kv_transfer;
  kv->target = request.kv_target;
  kv->first_position = request.kv_first_position;
  // How much fits there is for the other group to say.
  kv->max_length = static_cast<std::int64_t>(request.prompt_token_ids.size()) + request.max_tokens;
  return kv;
}

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(const EngineOptions& options) : options_(options), scheduler_(options) {}

  absl::Status Add(EngineRequest request, absl::Time now) override;
  const EngineOptions& options() const override { return options_; }
  void Cancel(RequestId id) override { cancelled_.push_back(id); }
  void ContinueKv(RequestId id, std::optional<std::int32_t> first_token,
                  std::string failure) override;
  void OnKvReport(const KvReport& report) override;
  const StepPlan* Step(absl::Time now, std::optional<StepResult> result) override;
  absl::Span<const TokenEvent> TakeEvents() override;
  absl::Span<const BlockChange> TakeBlockChanges() override {
    return scheduler_.TakeBlockChanges();
  }
  absl::Time NextDeadline() const override;
  bool HasWork() const override;
  EngineStats Stats() const override;
  void GetKvLengths(std::vector<std::int64_t>& lengths) const override;

 private:
  // What rows of a sequence will bring. It may be gone when that arrives.
  struct ResultsInFlight {
    RequestId id;
    std::uint64_t arrival;
    std::int32_t num_scored;
    bool sampled;
    bool logprobs;
  };
  struct StepInFlight {
    std::uint64_t step = 0;
    std::vector<ResultsInFlight> results;
    std::size_t num_tokens = 0;
    std::size_t num_logprobs = 0;
  };

  void Commit(const StepResult& result);
  // False when the sequence ends with them.
  bool AcceptPromptLogprobs(Sequence& sequence, absl::Span<PositionLogprobs> logprobs);
  void AcceptToken(Sequence& sequence, std::int32_t token_id, PositionLogprobs* logprobs);
  void Fail(Sequence& sequence, absl::Status error);
  void FailNotANumber(Sequence& sequence);
  void RemoveCancelledAndExpired(absl::Time now);
  void Finish(Sequence& sequence, TokenEvent event);

  // Who receives goes on by itself.
  void EndReceive(Sequence& sequence, const std::string& failure);
  // These two do nothing as long as something is missing.
  void FinishReceive(Sequence& sequence);
  void FinishSend(Sequence& sequence);
  void TakeFirstToken(Sequence& sequence, std::int32_t token_id);
  void FailKv(Sequence& sequence, const std::string& why);
  void FailStuckSenders();
  void CheckLeases(absl::Time now);

  const EngineOptions options_;
  Scheduler scheduler_;
  // Destroyed before the scheduler, whose blocks they hold.
  absl::flat_hash_map<RequestId, std::unique_ptr<Sequence>> requests_;
  absl::btree_set<std::pair<absl::Time, RequestId>> deadlines_;  // the finite ones
  std::vector<RequestId> cancelled_;
  std::uint64_t num_arrivals_ = 0;
  absl::Time now_ = absl::InfinitePast();  // of the last Step()
  std::uint64_t kv_expired_ = 0;
  absl::Time next_lease_end_ = absl::InfiniteFuture();

  StepPlan plan_;
  std::uint64_t last_step_ = 0;
  std::vector<PlannedResults> planned_;
  std::array<StepInFlight, 2> in_flight_;  // the oldest first
  int num_in_flight_ = 0;

  std::vector<TokenEvent> events_;
  std::vector<TokenEvent> taken_events_;
  std::uint64_t generation_tokens_ = 0;
};

absl::Status EngineImpl::Add(EngineRequest request, absl::Time /*now*/) {
  if (requests_.contains(request.id)) {
    return absl::AlreadyExistsError(
        fmt::format("request id {} is in use", static_cast<std::uint64_t>(request.id)));
  }
  if (std::ssize(requests_) >= std::int64_t{options_.max_num_seqs} + options_.max_num_waiting) {
    return absl::ResourceExhaustedError(
        fmt::format("{} requests run or wait; max_num_seqs is {}, max_num_waiting {}",
                    requests_.size(), options_.max_num_seqs, options_.max_num_waiting));
  }
  if (request.hash_chain.empty()) HashPrompt(request, options_);
  const std::vector<std::int32_t> resumed = std::move(request.resume_token_ids);
  std::unique_ptr<KvHandoff> kv = MakeHandoff(request);
  auto sequence =
      std::make_unique<Sequence>(std::move(request), ++num_arrivals_, options_.max_model_len);
  if (!resumed.empty()) sequence->scored = sequence->score_end;
  for (std::int32_t token_id : resumed) {
    const FinishReason reason = sequence->Append(token_id);
    if (reason != FinishReason::kNone) {
      events_.push_back({.id = sequence->id, .finish = reason});
      return absl::OkStatus();
    }
  }
  if (kv != nullptr && kv->sends) sequence->max_length = sequence->length() + 1;
  sequence->kv = std::move(kv);
  if (sequence->deadline != absl::InfiniteFuture()) {
    deadlines_.insert({sequence->deadline, sequence->id});
  }
  scheduler_.Enqueue(*sequence);
  requests_.emplace(sequence->id, std::move(sequence));
  return absl::OkStatus();
}

const StepPlan* EngineImpl::Step(absl::Time now, std::optional<StepResult> result) {
  if (result.has_value()) Commit(*result);
  RemoveCancelledAndExpired(now);
  now_ = now;
  CheckLeases(now);
  if (num_in_flight_ >= (options_.async_scheduling ? 2 : 1)) return nullptr;

  plan_.Clear();
  plan_.step = last_step_ + 1;
  planned_.clear();
  scheduler_.Plan(plan_, planned_);
  for (Sequence* sequence : scheduler_.running()) {
    sequence->admitted = std::min(sequence->admitted, now);
  }
  if (plan_.sequences.empty() && plan_.kv_ops.empty()) {
    if (num_in_flight_ == 0) FailStuckSenders();
    return nullptr;
  }

  last_step_ = plan_.step;
  StepInFlight& step = in_flight_[num_in_flight_++];
  step.step = plan_.step;
  step.results.clear();
  step.num_tokens = 0;
  step.num_logprobs = 0;
  for (const PlannedResults& planned : planned_) {
    const Sequence& sequence = *planned.sequence;
    step.results.push_back({.id = sequence.id,
                            .arrival = sequence.key.arrival,
                            .num_scored = planned.num_scored,
                            .sampled = planned.sampled,
                            .logprobs = planned.sampled && sequence.logits != nullptr &&
                                        sequence.logits->logprobs.has_value()});
    step.num_tokens += planned.sampled;
    step.num_logprobs += planned.num_scored + step.results.back().logprobs;
  }
  return &plan_;
}

void EngineImpl::Commit(const StepResult& result) {
  CHECK_MSG(num_in_flight_ > 0, "a result without a step in flight");
  std::swap(in_flight_[0], in_flight_[1]);
  --num_in_flight_;
  const StepInFlight& step = in_flight_[1];  // out of flight now; what it has is still there
  CHECK_MSG(result.step == step.step, "results come in the order of the plans");
  CHECK_MSG(result.token_ids.size() == step.num_tokens, "a result has a token per sampled row");
  CHECK_MSG(result.logprobs.size() == step.num_logprobs, "a result has all logprobs asked for");
  std::size_t next_token = 0;
  std::size_t next_logprobs = 0;
  for (const ResultsInFlight& rows : step.results) {
    const auto scored = result.logprobs.subspan(next_logprobs, rows.num_scored);
    next_logprobs += rows.num_scored;
    PositionLogprobs* logprobs = nullptr;
    if (rows.logprobs) logprobs = &result.logprobs[next_logprobs++];
    const std::int32_t token_id = rows.sampled ? result.token_ids[next_token++] : 0;
    const auto it = requests_.find(rows.id);
    // One that has ended meanwhile: its rows were planned before that was known.
    if (it == requests_.end() || it->second->key.arrival != rows.arrival) continue;
    if (!scored.empty() && !AcceptPromptLogprobs(*it->second, scored)) continue;
    if (rows.sampled) AcceptToken(*it->second, token_id, logprobs);
  }
}

bool EngineImpl::AcceptPromptLogprobs(Sequence& sequence, absl::Span<PositionLogprobs> logprobs) {
  TokenEvent event{.id = sequence.id,
                   .num_preemptions = sequence.num_preemptions,
                   .num_cached_tokens = sequence.num_cached_tokens};
  for (PositionLogprobs& position : logprobs) {
    if (std::isnan(position.token.logprob)) {
      FailNotANumber(sequence);
      return false;
    }
    event.prompt_logprobs.push_back(std::move(position));
  }
  events_.push_back(std::move(event));
  return true;
}

void EngineImpl::AcceptToken(Sequence& sequence, std::int32_t token_id,
                             PositionLogprobs* logprobs) {
  --sequence.num_pending;
  if (token_id == kNoTokenLeft) {
    return Fail(sequence, absl::InvalidArgumentError(
                              "allowed_token_ids, bad_words and min_tokens leave no token"));
  }
  if (token_id < 0) return FailNotANumber(sequence);
  CHECK(token_id < options_.vocab_size);
  ++generation_tokens_;
  TokenEvent event{.id = sequence.id,
                   .token_id = token_id,
                   .finish = sequence.Append(token_id),
                   .num_preemptions = sequence.num_preemptions,
                   .num_cached_tokens = sequence.num_cached_tokens,
                   .output_index = sequence.num_output() - 1};
  if (logprobs != nullptr) event.logprobs = std::move(*logprobs);
  if (sequence.kv != nullptr && event.finish == FinishReason::kLength &&
      sequence.length() < sequence.kv->max_length) {
    event.finish = FinishReason::kNone;  // it goes on elsewhere
    sequence.kv->first_token = token_id;
    events_.push_back(std::move(event));
    FinishSend(sequence);
    return;
  }
  if (event.finish == FinishReason::kNone) {
    events_.push_back(std::move(event));
  } else {
    Finish(sequence, std::move(event));
  }
}

void EngineImpl::ContinueKv(RequestId id, std::optional<std::int32_t> first_token,
                            std::string failure) {
  const auto it = requests_.find(id);
  if (it == requests_.end() || !it->second->receiving()) return;
  Sequence& sequence = *it->second;
  if (first_token.has_value()) sequence.kv->first_token = first_token;
  if (!failure.empty()) return EndReceive(sequence, failure);
  sequence.kv->renewed = true;
  FinishReceive(sequence);
}

void EngineImpl::OnKvReport(const KvReport& report) {
  const auto running = scheduler_.running();
  const auto it = std::find_if(running.begin(), running.end(), [&report](const Sequence* s) {
    return s->kv != nullptr && s->kv->transfer == report.transfer;
  });
  if (it == running.end()) return;
  Sequence& sequence = **it;
  KvHandoff& kv = *sequence.kv;
  kv.renewed = true;
  switch (report.kind) {
    case KvReport::Kind::kOpened:
      if (++kv.num_opened != options_.num_ranks) return;
      events_.push_back({.id = sequence.id,
                         .kv_reserved = TokenEvent::KvReserved{
                             .transfer = kv.transfer, .first_position = kv.first_position}});
      return;
    case KvReport::Kind::kProgress:
      return;
    case KvReport::Kind::kDone:
      ++kv.num_done;
      return kv.sends ? FinishSend(sequence) : FinishReceive(sequence);
    case KvReport::Kind::kFailed:
      return FailKv(sequence, report.error);
  }
}

void EngineImpl::FailKv(Sequence& sequence, const std::string& why) {
  if (sequence.receiving()) return EndReceive(sequence, why);
  Fail(sequence, absl::UnavailableError(fmt::format("the KV was not handed over: {}", why)));
}

// Everything but the event: in the blocks it has, if it has any, it is a prompt like any other.
void EngineImpl::EndReceive(Sequence& sequence, const std::string& failure) {
  const std::optional<std::int32_t> first_token = sequence.kv->first_token;
  scheduler_.CloseKv(sequence);
  events_.push_back({.id = sequence.id, .kv_failure = failure});
  if (first_token.has_value()) TakeFirstToken(sequence, *first_token);
}

void EngineImpl::FinishReceive(Sequence& sequence) {
  const KvHandoff& kv = *sequence.kv;
  if (kv.num_done != options_.num_ranks || !kv.first_token.has_value()) return;
  const std::int32_t first_token = *kv.first_token;
  events_.push_back({.id = sequence.id, .kv_took = now_ - std::min(kv.opened_at, now_)});
  scheduler_.CloseKv(sequence);
  sequence.num_computed = sequence.length();
  TakeFirstToken(sequence, first_token);
}

// The client has it already.
void EngineImpl::TakeFirstToken(Sequence& sequence, std::int32_t token_id) {
  const FinishReason reason = sequence.Append(token_id);
  if (reason != FinishReason::kNone) Finish(sequence, {.id = sequence.id, .finish = reason});
}

void EngineImpl::FinishSend(Sequence& sequence) {
  if (sequence.kv->num_done != options_.num_ranks || !sequence.kv->first_token.has_value()) return;
  Finish(sequence, {.id = sequence.id,
                    .finish = FinishReason::kHandedOff,
                    .num_preemptions = sequence.num_preemptions,
                    .kv_took = now_ - std::min(sequence.kv->opened_at, now_)});
}

// Two groups that receive from each other, all blocks of both reserved: neither could compute what
// the other waits for. Whoever receives from here computes the prompt in the blocks it has.
void EngineImpl::FailStuckSenders() {
  for (Sequence* sequence : scheduler_.StuckSenders()) {
    FailKv(*sequence, "all that runs here waits for the KV of other groups, and holds the blocks");
  }
}

void EngineImpl::CheckLeases(absl::Time now) {
  next_lease_end_ = absl::InfiniteFuture();
  // From the back: who fails leaves.
  for (std::size_t i = scheduler_.running().size(); i > 0; --i) {
    Sequence& sequence = *scheduler_.running()[i - 1];
    if (sequence.kv == nullptr) continue;
    KvHandoff& kv = *sequence.kv;
    // A prompt that is being computed is no silence.
    if (kv.sends && !kv.first_token.has_value()) kv.renewed = true;
    kv.opened_at = std::min(kv.opened_at, now);
    if (std::exchange(kv.renewed, false)) kv.lease_end = now + options_.kv_lease;
    if (kv.lease_end <= now) {
      ++kv_expired_;
      FailKv(sequence, fmt::format("no progress for {}", absl::FormatDuration(options_.kv_lease)));
    } else {
      next_lease_end_ = std::min(next_lease_end_, kv.lease_end);
    }
  }
}

bool EngineImpl::HasWork() const {
  if (num_in_flight_ > 0) return false;
  if (!events_.empty() || scheduler_.HasKvOps()) return true;
  const auto running = scheduler_.running();
  const auto waits = [](const Sequence* s) {
    return s->receiving() ? s->kv->opened : s->sending();
  };
  return static_cast<std::size_t>(std::count_if(running.begin(), running.end(), waits)) <
         requests_.size();
}

void EngineImpl::FailNotANumber(Sequence& sequence) {
  // Blocks are stored before their results are known, and what made this one so may have come with
  // a prefix: nobody is to read any of it again.
  scheduler_.ForgetCache();
  Fail(sequence, absl::InternalError("the model's output was not a number"));
}

void EngineImpl::Fail(Sequence& sequence, absl::Status error) {
  Finish(sequence, {.id = sequence.id,
                    .finish = FinishReason::kError,
                    .error = std::move(error),
                    .num_preemptions = sequence.num_preemptions});
}

void EngineImpl::RemoveCancelledAndExpired(absl::Time now) {
  for (RequestId id : cancelled_) {
    const auto it = requests_.find(id);
    if (it == requests_.end()) continue;
    Finish(*it->second, {.id = id,
                         .finish = FinishReason::kAborted,
                         .num_preemptions = it->second->num_preemptions});
  }
  cancelled_.clear();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Sequence& sequence = *requests_.at(deadlines_.begin()->second);
    Finish(sequence, {.id = sequence.id,
                      .finish = FinishReason::kDeadline,
                      .num_preemptions = sequence.num_preemptions});
  }
}

void EngineImpl::Finish(Sequence& sequence, TokenEvent event) {
  const RequestId id = sequence.id;
  event.admitted = sequence.admitted;
  events_.push_back(std::move(event));
  scheduler_.Remove(sequence);
  deadlines_.erase({sequence.deadline, id});
  requests_.erase(id);
}

absl::Span<const TokenEvent> EngineImpl::TakeEvents() {
  taken_events_.clear();
  std::swap(events_, taken_events_);
  return taken_events_;
}

absl::Time EngineImpl::NextDeadline() const {
  const absl::Time deadline =
      deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
  return std::min(deadline, next_lease_end_);
}

EngineStats EngineImpl::Stats() const {
  EngineStats stats;
  scheduler_.FillStats(stats);
  stats.generation_tokens = generation_tokens_;
  stats.steps = last_step_;
  stats.kv_expired = kv_expired_;
  return stats;
}

void EngineImpl::GetKvLengths(std::vector<std::int64_t>& lengths) const {
  lengths.clear();
  for (const Sequence* sequence : scheduler_.running()) lengths.push_back(sequence->num_computed);
}

}  // namespace

absl::Status CheckRequest(const EngineRequest& request, const EngineOptions& options) {
  if (request.prompt_token_ids.empty()) {
    return absl::InvalidArgumentError("the prompt is empty; at least one token is needed");
  }
  const auto num_prompt_tokens = static_cast<std::int64_t>(request.prompt_token_ids.size());
  if (num_prompt_tokens + 1 > options.max_model_len) {
    return absl::InvalidArgumentError(
        fmt::format("the prompt has {} tokens; max_model_len {} allows {} and one to generate",
                    num_prompt_tokens, options.max_model_len, options.max_model_len - 1));
  }
  const std::pair<std::string_view, const std::vector<std::int32_t>*> tokens[] = {
      {"prompt_token_ids", &request.prompt_token_ids},
      {"resume_token_ids", &request.resume_token_ids},
      {"stop_token_ids", &request.stop_token_ids}};
  for (const auto& [what, token_ids] : tokens) {
    RETURN_IF_ERROR(ValidateTokens(what, *token_ids, options.vocab_size));
  }
  if (request.max_tokens < 1) {
    return absl::InvalidArgumentError(
        fmt::format("max_tokens is {}; allowed is 1 and above", request.max_tokens));
  }
  RETURN_IF_ERROR(ValidateSampling(request.sampling));
  if (request.logits == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(ValidateLogits(*request.logits, options.vocab_size));
  if (request.logits->min_tokens > request.max_tokens) {
    return absl::InvalidArgumentError(fmt::format("min_tokens is {}; max_tokens {} allows 0 to {}",
                                                  request.logits->min_tokens, request.max_tokens,
                                                  request.max_tokens));
  }
  return absl::OkStatus();
}

void HashPrompt(EngineRequest& request, const EngineOptions& options) {
  if (!options.enable_prefix_caching) return;
  request.hash_chain = StartHashChain(options.block_hash_key, request.cache_salt);
  ExtendHashChain(request.prompt_token_ids, options.block_size, request.hash_chain);
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  return std::make_unique<EngineImpl>(options);
}

}  // namespace weft
