#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/types/span.h"
#include "worker/engine/block_manager.h"
#include "worker/engine/engine.h"
#include "worker/engine/sequence.h"
#include "worker/engine/step_plan.h"

namespace weft {

// Rows of a plan that bring something.
struct PlannedResults {
  Sequence* sequence = nullptr;
  std::int32_t num_scored = 0;
  bool sampled = false;
};

// Who runs in a step, with how many rows, in which slot and blocks. engine.h states the policy.
//
// A plan is made in two parts: first rows and blocks are decided, and a decision can be taken back
// by a preemption; then what stands is written down. So nothing is ever planned for a sequence that
// lost its blocks, and no block has two owners in a plan.
//
// One thread; owns no sequence. A sequence given to Enqueue() stays alive until Remove().
class Scheduler {
 public:
  explicit Scheduler(const EngineOptions& options);

  void Enqueue(Sequence& sequence);
  // Leaves the queue, or gives back slot and blocks.
  void Remove(Sequence& sequence);
  // The sequence's hand-off is over: the ranks will forget the transfer with the next plan.
  void CloseKv(Sequence& sequence);
  // That plan would have something to say.
  bool HasKvOps() const { return !kv_closes_.empty(); }

  // Fills `plan` for step plan.step and `results` with what its rows with logits will bring, in
  // order. Leaves both empty when nothing can run. At most one step may be in flight, the one
  // before.
  void Plan(StepPlan& plan, std::vector<PlannedResults>& results);

  // Who waits to send, when all that run wait for KV of other groups: one that waits here, too, for
  // the same reason may be what one of those needs. To be asked when nothing could be planned and
  // nothing is in flight.
  std::vector<Sequence*> StuckSenders() const;

  // Empties the prefix cache; what runs now will not be in it either.
  void ForgetCache();

  // Of BlockManager.
  absl::Span<const BlockChange> TakeBlockChanges() { return blocks_.TakeChanges(); }

  std::int32_t num_waiting() const { return static_cast<std::int32_t>(waiting_.size()); }
  absl::Span<Sequence* const> running() const { return running_; }
  // Sets what the scheduler knows of it.
  void FillStats(EngineStats& stats) const;

 private:
  struct ByKey {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->key < b->key; }
  };

  void CollectCandidates();
  std::int32_t PrefillFloor(std::uint64_t step) const;
  void ScheduleDecodes(std::int32_t rows_to_leave);
  void SchedulePrefills();
  bool Admit(Sequence& sequence);
  std::int32_t MostCached(const Sequence& sequence) const;
  BlockManager::CachedPrefix FindCached(Sequence& sequence) const;
  bool ComputesNow(const Sequence& other, std::int32_t index, const BlockHash& hash) const;
  void TakeBlocks(Sequence& sequence, std::int32_t num_cached, std::int32_t num_blocks);
  void StoreFullBlocks(Sequence& sequence);
  bool MakeRoomForNextRow(Sequence& sequence);
  Sequence* PickVictim() const;
  void Preempt(Sequence& victim);
  void Reserve(Sequence& sequence, std::int32_t num_rows);
  void Write(Sequence& sequence, StepPlan& plan, std::vector<PlannedResults>& results);
  void WriteSampling(Sequence& sequence, StepPlan& plan);
  void WriteBlocks(Sequence& sequence, StepPlan& plan);
  void WriteReceive(Sequence& sequence, StepPlan& plan);
  void WriteSend(Sequence& sequence, std::int32_t num_rows, StepPlan& plan);
  std::int32_t BlocksFor(std::int64_t num_tokens) const;
  void Release(Sequence& sequence);

  const EngineOptions options_;
  BlockManager blocks_;
  std::vector<std::int32_t> free_slots_;
  std::vector<Sequence*> running_;  // sorted by key
  absl::btree_set<Sequence*, ByKey> waiting_;
  QueueKey last_decode_;  // whose turn was last, when decodes do not all fit into a step
  std::vector<std::uint64_t> kv_closes_;  // transfers to be forgotten
  std::uint64_t num_preemptions_ = 0;
  std::uint64_t prompt_tokens_ = 0;
  std::uint64_t cache_queries_ = 0;
  std::uint64_t cache_hits_ = 0;
  std::int32_t peak_running_ = 0;

  // Of the plan being made.
  std::int32_t rows_left_ = 0;
  std::int32_t logits_left_ = 0;  // rows with logits
  std::int32_t num_sampled_ = 0;
  std::vector<Sequence*> decodes_;   // from the one whose turn it is
  std::vector<Sequence*> prefills_;  // by key
};

}  // namespace weft
