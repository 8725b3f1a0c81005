#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/types/span.h"
#include "worker/engine/engine.h"
#include "worker/engine/step_plan.h"

namespace weft {

PlanLimits LimitsOf(const EngineOptions& options);

// What the simulated model says after `tokens`: a hash of the seed and of all of them.
struct SimulatedModel {
  std::int32_t vocab_size = 50;
  std::int32_t nan_one_in = 0;  // one result in this many is -1; 0 is never

  std::int32_t NextToken(std::uint64_t seed, absl::Span<const std::int32_t> tokens) const;
  // What a request gets: of LogitsParams (null: none) min_tokens is obeyed, by taking the next id.
  std::int32_t Sample(std::uint64_t seed, absl::Span<const std::int32_t> tokens,
                      std::int32_t num_prompt_tokens, const LogitsParams* params) const;
};

// The plain sequential computation, without batches, blocks or ends: the truth.
class Oracle {
 public:
  explicit Oracle(const SimulatedModel& model) : model_(model) {}

  // Sequences are told apart by their seeds.
  void Add(const EngineRequest& request);
  bool Knows(std::uint64_t seed) const { return sequences_.contains(seed); }
  // The first `length` tokens. One that was not a number is 0 here, as rows after it see it.
  absl::Span<const std::int32_t> Tokens(std::uint64_t seed, std::size_t length);

 private:
  SimulatedModel model_;
  struct TrueSequence {
    std::vector<std::int32_t> tokens;
    std::int32_t num_prompt_tokens = 0;
    std::shared_ptr<const LogitsParams> logits;
  };
  std::map<std::uint64_t, TrueSequence> sequences_;
};

// A group of ranks as the engine sees it: executes plans, in order, against a paged KV memory in
// which every position remembers which token was written there after which others, and checks every
// plan against what step_plan.h promises. Failures are gtest failures.
class SimulatedGroup {
 public:
  SimulatedGroup(const EngineOptions& options, const SimulatedModel& model, Oracle& oracle);

  // Queues a plan; it is executed by Execute().
  void Launch(const StepPlan& plan) { queue_.push_back(plan); }
  int num_in_flight() const { return static_cast<int>(queue_.size()); }
  // Runs the oldest plan. The result is valid until the next call.
  StepResult Execute();

  std::int64_t num_references() const { return num_references_; }
  // Table deltas that changed what a slot had.
  std::int64_t num_rewrites() const { return num_rewrites_; }

 private:
  struct Cell {
    std::int64_t position = -1;  // never written
    std::int32_t token = 0;
    std::uint64_t context = 0;  // of the tokens up to this one: what KV depends on
  };
  struct Slot {
    std::vector<std::int32_t> table;
    SamplingParams sampling;
    std::shared_ptr<const LogitsParams> logits;
    std::vector<std::int32_t> known_tokens;  // with logits: prompt and output
    std::int32_t num_prompt_tokens = 0;
    bool taken_over = false;  // and no row was run since
    std::int64_t next_position = 0;
  };

  void ApplyDeltas(const StepPlan& plan);
  void CheckShape(const StepPlan& plan);
  void CheckWriters(const StepPlan& plan);
  void TakeLogitsDeltas(absl::Span<const LogitsDelta> deltas,
                        absl::Span<const std::int32_t> previous_tokens);
  void ScoreRow(const Slot& slot, std::int64_t position);
  void SampleRow(Slot& slot, std::int64_t position);
  void RunSequence(const PlanSequence& sequence, absl::Span<const std::int32_t> tokens);
  bool ReadContext(const Slot& slot, std::int64_t position);
  Cell& CellOf(const Slot& slot, std::int64_t position);

  const EngineOptions options_;
  const SimulatedModel model_;
  Oracle& oracle_;
  std::vector<Slot> slots_;
  std::vector<Cell> memory_;  // [num_blocks, block_size]
  std::deque<StepPlan> queue_;
  std::uint64_t last_step_ = 0;
  std::vector<std::int32_t> previous_tokens_;  // sampled by the step before
  std::vector<std::int32_t> sampled_tokens_;
  std::vector<PositionLogprobs> logprobs_;
  std::vector<std::int32_t> context_;
  std::int64_t num_references_ = 0;
  std::int64_t num_rewrites_ = 0;
};

}  // namespace weft
