#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/engine/engine.h"

namespace weft {

inline constexpr absl::Time kStart = absl::UnixEpoch();

// An engine whose model says `next_token` always, and whose plans are read by request instead of by
// slot. A request's seed is its id.
class EngineHarness {
 public:
  using Rows = std::map<std::uint64_t, std::int32_t>;  // request -> rows of it in a plan

  explicit EngineHarness(EngineOptions options) {
    options.vocab_size = 100;
    absl::StatusOr<std::unique_ptr<Engine>> made = Engine::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    engine = *std::move(made);
  }

  static EngineRequest Request(std::uint64_t id, std::int64_t prompt_tokens) {
    EngineRequest request;
    request.id = RequestId{id};
    request.prompt_token_ids.assign(prompt_tokens, 3);
    // No two requests share a prefix by accident.
    if (prompt_tokens > 0) request.prompt_token_ids[0] = static_cast<std::int32_t>(id % 100);
    request.max_tokens = 1000;
    request.sampling.seed = id;
    return request;
  }
  void Add(std::uint64_t id, std::int64_t prompt_tokens, std::int32_t priority = 0) {
    EngineRequest request = Request(id, prompt_tokens);
    request.priority = priority;
    Add(std::move(request));
  }
  void Add(EngineRequest request) {
    const absl::Status status = engine->Add(std::move(request), kStart);
    ASSERT_TRUE(status.ok()) << status;
  }
  void Cancel(std::uint64_t id) { engine->Cancel(RequestId{id}); }

  // Brings the result of the oldest step in flight, if there is one, and plans.
  Rows Step(absl::Time now = kStart) {
    if (in_flight.empty()) return Plan(std::nullopt, now);
    const InFlight step = in_flight.front();
    in_flight.pop_front();
    const std::vector<std::int32_t> tokens(step.num_tokens, next_token);
    std::vector<PositionLogprobs> logprobs(step.num_logprobs);
    return Plan(
        StepResult{.step = step.step, .token_ids = tokens, .logprobs = absl::MakeSpan(logprobs)},
        now);
  }
  // Plans on top of what is in flight.
  Rows StepAhead(absl::Time now = kStart) { return Plan(std::nullopt, now); }

  std::vector<TokenEvent> Events() {
    const absl::Span<const TokenEvent> events = engine->TakeEvents();
    return {events.begin(), events.end()};
  }
  // The last event of `id` since Events() was called.
  TokenEvent LastEvent(std::uint64_t id) {
    TokenEvent last;
    for (TokenEvent& event : Events()) {
      if (event.id == RequestId{id}) last = event;
    }
    EXPECT_EQ(last.id, RequestId{id}) << "no news";
    return last;
  }

  std::unique_ptr<Engine> engine;
  std::int32_t next_token = 1;
  std::optional<StepPlan> plan;  // the last one, if the last call gave one
  struct InFlight {
    std::uint64_t step;
    std::int32_t num_tokens;
    std::int32_t num_logprobs;
  };
  std::deque<InFlight> in_flight;
  std::map<std::int32_t, std::uint64_t> owners;  // slot -> request
  std::set<std::int32_t> tells_logprobs;         // slots

 private:
  Rows Plan(std::optional<StepResult> result, absl::Time now) {
    const StepPlan* made = engine->Step(now, result);
    plan.reset();
    Rows rows;
    if (made == nullptr) return rows;
    plan = *made;
    in_flight.push_back({made->step, made->num_sampled_rows(), 0});
    for (const SamplingDelta& delta : made->sampling_deltas) {
      owners[delta.slot] = delta.params.seed;
      tells_logprobs.erase(delta.slot);
    }
    for (const LogitsDelta& delta : made->logits_deltas) {
      if (delta.params->logprobs.has_value()) tells_logprobs.insert(delta.slot);
    }
    for (const PlanSequence& sequence : made->sequences) {
      rows[owners.at(sequence.slot)] = sequence.num_rows;
      in_flight.back().num_logprobs += sequence.num_scored;
      if (tells_logprobs.contains(sequence.slot)) {
        in_flight.back().num_logprobs += sequence.num_sampled;
      }
    }
    return rows;
  }
};

}  // namespace weft
