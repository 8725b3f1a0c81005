#include "worker/engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "server/base/check.h"

namespace weft {

Scheduler::Scheduler(const EngineOptions& options)
    : options_(options), blocks_(options.num_blocks) {
  for (std::int32_t slot = options.max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  running_.reserve(options.max_num_seqs);
  decodes_.reserve(options.max_num_seqs);
  prefills_.reserve(options.max_num_seqs);
}

void Scheduler::Enqueue(Sequence& sequence) { waiting_.insert(&sequence); }

void Scheduler::Remove(Sequence& sequence) {
  if (sequence.running) {
    Release(sequence);
  } else {
    waiting_.erase(&sequence);
  }
}

void Scheduler::Plan(StepPlan& plan, std::vector<PlannedResults>& results) {
  const std::uint64_t step = plan.step;
  rows_left_ = options_.max_num_batched_tokens;
  logits_left_ = options_.max_num_seqs;
  num_sampled_ = 0;
  for (Sequence* sequence : running_) StoreFullBlocks(*sequence);
  if (options_.force_preemption_every > 0 && step % options_.force_preemption_every == 0) {
    if (Sequence* victim = PickVictim()) Preempt(*victim);
  }
  for (const std::uint64_t transfer : kv_closes_) {
    plan.kv_ops.push_back({.kind = KvOp::Kind::kClose, .transfer = transfer});
  }
  kv_closes_.clear();
  CollectCandidates();
  ScheduleDecodes(PrefillFloor(step));
  SchedulePrefills();
  ScheduleDecodes(0);  // takes what the prefills left of their floor
  for (Sequence* sequence : running_) {
    if (sequence->planned_rows > 0) Write(*sequence, plan, results);
    if (sequence->receiving() && !sequence->kv->opened) WriteReceive(*sequence, plan);
  }
}

void Scheduler::CollectCandidates() {
  decodes_.clear();
  prefills_.clear();
  for (Sequence* sequence : running_) {
    if (sequence->ending() || sequence->receiving()) continue;
    (sequence->num_remaining() == 1 ? decodes_ : prefills_).push_back(sequence);
  }
  const auto turn = std::find_if(decodes_.begin(), decodes_.end(), [this](const Sequence* decode) {
    return decode->key > last_decode_;
  });
  std::rotate(decodes_.begin(), turn, decodes_.end());
}

// Rows that decodes leave to prefills when both want more than there is: a quarter of the budget,
// on average over steps where that is no whole number.
std::int32_t Scheduler::PrefillFloor(std::uint64_t step) const {
  if (prefills_.empty() && (waiting_.empty() || free_slots_.empty())) return 0;
  return static_cast<std::int32_t>((options_.max_num_batched_tokens + step % 4) / 4);
}

// A candidate may have been preempted since it was collected, and even admitted again: then it has
// rows already.
void Scheduler::ScheduleDecodes(std::int32_t rows_to_leave) {
  for (Sequence* sequence : decodes_) {
    if (rows_left_ <= rows_to_leave || logits_left_ == 0) return;
    if (!sequence->running || sequence->planned_rows > 0) continue;
    if (!MakeRoomForNextRow(*sequence)) continue;
    Reserve(*sequence, 1);
    last_decode_ = sequence->key;
  }
}

void Scheduler::SchedulePrefills() {
  auto next = prefills_.begin();
  bool admitting = true;
  while (rows_left_ > 0) {
    while (next != prefills_.end() && (!(*next)->running || (*next)->planned_rows > 0)) ++next;
    Sequence* sequence = next != prefills_.end() ? *next : nullptr;
    if (admitting && !waiting_.empty()) {
      Sequence* head = *waiting_.begin();
      if (sequence == nullptr || head->key < sequence->key) {
        // First come, first served: when the head does not fit, nobody behind it is tried.
        admitting = Admit(*head);
        if (!admitting || head->receiving()) continue;
        sequence = head;
      }
    }
    if (sequence == nullptr) return;
    auto num_rows =
        static_cast<std::int32_t>(std::min<std::int64_t>(sequence->num_remaining(), rows_left_));
    // Rows with logits are a chunk's last ones.
    num_rows -= std::max(0, sequence->NumLogits(num_rows) - logits_left_);
    if (num_rows == 0) return;
    Reserve(*sequence, num_rows);
  }
}

void Scheduler::Reserve(Sequence& sequence, std::int32_t num_rows) {
  sequence.planned_rows = num_rows;
  rows_left_ -= num_rows;
  logits_left_ -= sequence.NumLogits(num_rows);
}

std::vector<Sequence*> Scheduler::StuckSenders() const {
  std::vector<Sequence*> stuck;
  for (const Sequence* sequence : running_) {
    if (!sequence->receiving()) return stuck;
  }
  for (Sequence* sequence : waiting_) {
    if (sequence->kv != nullptr && sequence->kv->sends) stuck.push_back(sequence);
  }
  return stuck;
}

// Moves a waiting sequence to the running ones with the blocks of all its tokens, so that prefills
// never run out. Alone it needs no reserve: the engine refused what could not fit by itself.
bool Scheduler::Admit(Sequence& sequence) {
  if (free_slots_.empty()) return false;
  const BlockManager::CachedPrefix cached = FindCached(sequence);
  // Who receives may get a token more before it has to compute after all.
  const std::int32_t num_blocks = BlocksFor(sequence.length() + (sequence.receiving() ? 1 : 0));
  const std::int32_t needed = num_blocks - (cached.num_blocks - cached.num_unheld);
  const std::int32_t reserve = running_.empty() ? 0 : 1 + options_.num_blocks / 100;
  if (blocks_.num_free() < needed + reserve) return false;
  if (cached.num_blocks < MostCached(sequence)) {
    const BlockHash& next = sequence.hash_chain[1 + cached.num_blocks];
    for (const Sequence* other : running_) {
      if (ComputesNow(*other, cached.num_blocks, next)) return false;
    }
  }

  waiting_.erase(&sequence);
  sequence.running = true;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  running_.insert(std::lower_bound(running_.begin(), running_.end(), &sequence, ByKey()),
                  &sequence);
  // All it may ever need, so that its decodes allocate nothing.
  sequence.token_ids.reserve(sequence.max_length);
  sequence.blocks.reserve(BlocksFor(sequence.max_length));
  if (!sequence.hash_chain.empty()) sequence.hash_chain.reserve(1 + BlocksFor(sequence.max_length));
  TakeBlocks(sequence, cached.num_blocks, num_blocks);
  peak_running_ = std::max(peak_running_, static_cast<std::int32_t>(running_.size()));
  return true;
}

// Full blocks that may be taken from the cache: the last token's row is always computed, for what
// comes after it, and all of a prompt that is to be scored.
std::int32_t Scheduler::MostCached(const Sequence& sequence) const {
  if (sequence.hash_chain.empty() || sequence.scored < sequence.score_end) return 0;
  return static_cast<std::int32_t>((sequence.length() - 1) / options_.block_size);
}

BlockManager::CachedPrefix Scheduler::FindCached(Sequence& sequence) const {
  const std::int32_t most = MostCached(sequence);
  if (most == 0) return {};
  ExtendHashChain(sequence.token_ids, options_.block_size, sequence.hash_chain);
  return blocks_.FindPrefix(absl::MakeConstSpan(sequence.hash_chain).subspan(1, most));
}

// Whether the plan being made fills block `index` of `other`, and it is the one of that hash.
bool Scheduler::ComputesNow(const Sequence& other, std::int32_t index,
                            const BlockHash& hash) const {
  const std::int64_t end = (index + std::int64_t{1}) * options_.block_size;
  return other.num_computed < end && other.num_computed + other.planned_rows >= end &&
         static_cast<std::int32_t>(other.hash_chain.size()) > 1 + index &&
         other.hash_chain[1 + index] == hash;
}

void Scheduler::TakeBlocks(Sequence& sequence, std::int32_t num_cached, std::int32_t num_blocks) {
  for (std::int32_t i = 0; i < num_cached; ++i) {
    sequence.blocks.push_back(blocks_.Share(sequence.hash_chain[1 + i]));
  }
  for (std::int32_t i = num_cached; i < num_blocks; ++i) {
    sequence.blocks.push_back(*blocks_.Allocate());
  }
  sequence.num_stored_blocks = num_cached;
  sequence.num_computed = std::int64_t{num_cached} * options_.block_size;
  if (sequence.num_preemptions > 0) return;
  prompt_tokens_ += sequence.num_prompt_tokens;
  if (sequence.hash_chain.empty() || sequence.scored < sequence.score_end) return;
  cache_queries_ += sequence.length();
  cache_hits_ += sequence.num_computed;
  sequence.num_cached_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(
      sequence.num_computed, static_cast<std::int64_t>(sequence.num_prompt_tokens)));
}

void Scheduler::ForgetCache() {
  for (Sequence* sequence : running_) sequence->hash_chain.clear();
  blocks_.ForgetAll();
}

// Blocks whose every row was in an earlier plan and whose every token is known go to the cache. Not
// during a hand-off: the ranks know the blocks it is about.
void Scheduler::StoreFullBlocks(Sequence& sequence) {
  if (sequence.hash_chain.empty() || sequence.kv != nullptr) return;
  const std::int64_t num_known =
      std::min(sequence.num_computed, static_cast<std::int64_t>(sequence.token_ids.size()));
  const auto end = static_cast<std::int32_t>(num_known / options_.block_size);
  if (sequence.num_stored_blocks == end) return;
  ExtendHashChain(sequence.token_ids, options_.block_size, sequence.hash_chain);
  for (std::int32_t& i = sequence.num_stored_blocks; i < end; ++i) {
    BlockRef& block = sequence.blocks[i];
    const BlockId own = block.id();
    const BlockHash* parent = i == 0 ? nullptr : &sequence.hash_chain[i];
    block = blocks_.Store(std::move(block), sequence.hash_chain[1 + i], parent);
    // Another sequence computed the same: from here on this one reads that one's.
    if (block.id() != own) sequence.num_sent_blocks = std::min(sequence.num_sent_blocks, i);
  }
}

// False when the row cannot run in this step: the sequence itself was preempted, or blocks come
// back by themselves in a step or two.
bool Scheduler::MakeRoomForNextRow(Sequence& sequence) {
  if (BlocksFor(sequence.num_computed + 1) <= static_cast<std::int32_t>(sequence.blocks.size())) {
    return true;
  }
  while (true) {
    if (std::optional<BlockRef> block = blocks_.Allocate()) {
      sequence.blocks.push_back(*std::move(block));
      return true;
    }
    for (const Sequence* other : running_) {
      if (other->ending() && !other->sending()) return false;
    }
    Sequence* victim = PickVictim();
    // Whoever needs a block has had a token since it was admitted, so it may be the victim itself.
    CHECK(victim != nullptr);
    Preempt(*victim);
    if (victim == &sequence) return false;
  }
}

// The youngest of the least important priority that has made progress. Every preemption costs its
// victim's last token and no sequence has endless ones: so all requests end.
Sequence* Scheduler::PickVictim() const {
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    if (!(*it)->must_progress && !(*it)->ending() && (*it)->kv == nullptr) return *it;
  }
  return nullptr;
}

// Its place in the queue is that of its arrival: the head of its priority, since all that wait came
// later.
void Scheduler::Preempt(Sequence& victim) {
  rows_left_ += victim.planned_rows;
  logits_left_ += victim.NumLogits(victim.planned_rows);
  Release(victim);
  victim.must_progress = true;
  ++victim.num_preemptions;
  ++num_preemptions_;
  waiting_.insert(&victim);
}

void Scheduler::CloseKv(Sequence& sequence) {
  if (sequence.kv == nullptr) return;
  if (sequence.kv->opened) kv_closes_.push_back(sequence.kv->transfer);
  sequence.kv = nullptr;
}

void Scheduler::Release(Sequence& sequence) {
  CloseKv(sequence);
  StoreFullBlocks(sequence);
  running_.erase(std::lower_bound(running_.begin(), running_.end(), &sequence, ByKey()));
  free_slots_.push_back(sequence.slot);
  sequence.running = false;
  while (!sequence.blocks.empty()) sequence.blocks.pop_back();  // the last first: BlockManager
  sequence.num_sent_blocks = 0;
  sequence.num_stored_blocks = 0;
  sequence.sampling_sent = false;
  sequence.num_computed = 0;
  sequence.planned_rows = 0;
}

void Scheduler::WriteSampling(Sequence& sequence, StepPlan& plan) {
  if (std::exchange(sequence.sampling_sent, true)) return;
  const std::int32_t slot = sequence.slot;
  plan.sampling_deltas.push_back({.slot = slot, .params = sequence.sampling});
  if (sequence.logits == nullptr) return;
  LogitsDelta& delta = plan.logits_deltas.emplace_back(
      LogitsDelta{.slot = slot,
                  .params = sequence.logits,
                  .token_ids = sequence.token_ids,
                  .num_prompt_tokens = static_cast<std::int32_t>(sequence.num_prompt_tokens)});
  if (sequence.num_pending > 0) delta.token_ids.push_back(~sequence.pending_index);
}

void Scheduler::WriteBlocks(Sequence& sequence, StepPlan& plan) {
  const std::int32_t slot = sequence.slot;
  const auto num_blocks = static_cast<std::int32_t>(sequence.blocks.size());
  if (num_blocks > sequence.num_sent_blocks) {
    plan.table_deltas.push_back({.slot = slot,
                                 .first_index = sequence.num_sent_blocks,
                                 .num_blocks = num_blocks - sequence.num_sent_blocks});
    for (std::int32_t i = sequence.num_sent_blocks; i < num_blocks; ++i) {
      plan.delta_blocks.push_back(static_cast<std::int32_t>(sequence.blocks[i].id()));
    }
    sequence.num_sent_blocks = num_blocks;
  }
}

void Scheduler::WriteReceive(Sequence& sequence, StepPlan& plan) {
  WriteBlocks(sequence, plan);
  KvHandoff& kv = *sequence.kv;
  kv.opened = true;
  kv.first_position = sequence.num_computed;
  plan.kv_ops.push_back({.kind = KvOp::Kind::kReceive,
                         .slot = sequence.slot,
                         .transfer = kv.transfer,
                         .first_position = kv.first_position,
                         .end_position = sequence.length()});
}

void Scheduler::WriteSend(Sequence& sequence, std::int32_t num_rows, StepPlan& plan) {
  KvHandoff& kv = *sequence.kv;
  if (!std::exchange(kv.opened, true)) {
    plan.kv_ops.push_back({.kind = KvOp::Kind::kSend,
                           .slot = sequence.slot,
                           .transfer = kv.transfer,
                           .first_position = kv.first_position,
                           .end_position = kv.first_position,
                           .target = kv.target});
  }
  plan.kv_ops.push_back({.kind = KvOp::Kind::kSendRows,
                         .last = num_rows == sequence.num_remaining(),
                         .slot = sequence.slot,
                         .transfer = kv.transfer,
                         .first_position = sequence.num_computed,
                         .end_position = sequence.num_computed + num_rows});
}

void Scheduler::Write(Sequence& sequence, StepPlan& plan, std::vector<PlannedResults>& results) {
  WriteSampling(sequence, plan);
  WriteBlocks(sequence, plan);
  const std::int32_t num_rows = std::exchange(sequence.planned_rows, 0);
  if (sequence.kv != nullptr) WriteSend(sequence, num_rows, plan);
  const bool samples = num_rows == sequence.num_remaining();
  const std::int32_t num_scored = sequence.NumScored(num_rows);
  plan.sequences.push_back({.slot = sequence.slot,
                            .num_rows = num_rows,
                            .first_position = sequence.num_computed,
                            .num_sampled = samples ? 1 : 0,
                            .num_scored = num_scored});
  if (samples || num_scored > 0) {
    results.push_back({.sequence = &sequence, .num_scored = num_scored, .sampled = samples});
  }
  CHECK(sequence.num_pending <= 1);  // pending_index is one of the step before
  const std::int64_t end = sequence.num_computed + num_rows;
  const auto num_known = static_cast<std::int64_t>(sequence.token_ids.size());
  plan.token_ids.insert(plan.token_ids.end(), sequence.token_ids.begin() + sequence.num_computed,
                        sequence.token_ids.begin() + std::min(end, num_known));
  if (end > num_known) plan.token_ids.push_back(~sequence.pending_index);
  sequence.num_computed = end;
  sequence.scored = std::max(sequence.scored, std::min(end, sequence.score_end));
  if (samples) {
    sequence.pending_index = num_sampled_++;
    ++sequence.num_pending;
    sequence.must_progress = false;
  }
}

std::int32_t Scheduler::BlocksFor(std::int64_t num_tokens) const {
  return static_cast<std::int32_t>((num_tokens + options_.block_size - 1) / options_.block_size);
}

void Scheduler::FillStats(EngineStats& stats) const {
  stats.num_running = static_cast<std::int32_t>(running_.size());
  stats.num_waiting = num_waiting();
  stats.num_blocks = blocks_.num_blocks();
  stats.num_free_blocks = blocks_.num_free();
  stats.num_cached_blocks = blocks_.num_cached();
  stats.prefix_cache_queries = cache_queries_;
  stats.prefix_cache_hits = cache_hits_;
  stats.prefix_cache_evictions = blocks_.num_evictions();
  stats.peak_running = peak_running_;
  stats.kv_tokens = 0;
  for (const Sequence* sequence : running_) stats.kv_tokens += sequence->num_computed;
  stats.num_preemptions = num_preemptions_;
  stats.prompt_tokens = prompt_tokens_;
}

}  // namespace weft
