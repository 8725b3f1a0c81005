#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/block_hash.h"
#include "worker/engine/block_manager.h"
#include "worker/engine/kv_report.h"
#include "worker/engine/logits_params.h"
#include "worker/engine/step_plan.h"

namespace weft {

enum class RequestId : std::uint64_t {};  // drawn by the caller, unique for the engine's life

struct EngineOptions {
  std::int32_t block_size = 128;              // V, tokens over the DCP group
  std::int32_t num_blocks = 0;                // blocks the group has: the minimum over ranks
  std::int64_t max_model_len = 0;             // prompt + generated
  std::int32_t max_num_seqs = 64;             // running at once; also the number of slots
  std::int32_t max_num_batched_tokens = 256;  // rows of a step
  std::int32_t max_num_waiting = 1024;        // and requests beside them (--max-num-waiting)
  std::int32_t vocab_size = 0;
  bool async_scheduling = true;  // plan step k+1 while k runs
  bool enable_prefix_caching = true;
  std::string block_hash_key;                   // BlockHashKey() of the model
  std::int32_t num_ranks = 1;                   // that report on KV transfers
  absl::Duration kv_lease = absl::Seconds(30);  // a transfer without progress ends
  // Test hook: preempt one more running sequence than needed every this many steps; 0 is never.
  std::int32_t force_preemption_every = 0;
};

struct EngineRequest {
  RequestId id{};
  std::vector<std::int32_t> prompt_token_ids;  // at least one
  std::vector<std::int32_t> resume_token_ids;  // already generated elsewhere; counts as output
  std::int32_t max_tokens = 16;                // output tokens, resumed ones included; >= 1
  std::vector<std::int32_t> stop_token_ids;    // end the sequence; part of its output
  std::vector<std::int32_t> eos_token_ids;     // likewise, unless ignore_eos
  bool ignore_eos = false;
  SamplingParams sampling;                     // whole_row is set by the engine
  std::shared_ptr<const LogitsParams> logits;  // null: none of it
  std::int32_t priority = 0;                   // lower is sooner, as in vLLM
  std::string cache_salt;                      // requests of other salts share no cached blocks
  std::vector<BlockHash> hash_chain;           // of the prompt: HashPrompt()
  absl::Time deadline = absl::InfiniteFuture();

  // With a transfer the prompt is computed by one group and the output by another. With a target
  // this is the first: it ends with its first token, and holds its blocks until they were taken.
  // Without one the KV of the prompt comes from there; see ContinueKv().
  std::uint64_t kv_transfer = 0;  // 0: none
  std::shared_ptr<const std::string> kv_target;
  std::int64_t kv_first_position = 0;  // with a target: what is before is there
};

enum class FinishReason : std::uint8_t {
  kNone,
  kStopToken,
  kEos,
  kLength,
  kAborted,
  kDeadline,
  kError,
  kHandedOff,  // of a request with kv_target: its KV was taken
};

// INVALID_ARGUMENT, saying what was seen and what is allowed: an empty prompt, a token id outside
// the vocabulary, prompt + 1 > max_model_len, max_tokens < 1, min_tokens > max_tokens, what
// ValidateSampling() and ValidateLogits() refuse. Takes time linear in the request: not for the
// engine's thread.
absl::Status CheckRequest(const EngineRequest& request, const EngineOptions& options);

// Sets request.hash_chain, as prefix caching needs it. Add() does it otherwise; it takes time
// linear in the prompt: not for the engine's thread.
void HashPrompt(EngineRequest& request, const EngineOptions& options);

// News of one request. Events of one request are in order; a `finish` other than kNone is the last.
struct TokenEvent {
  RequestId id{};
  std::optional<std::int32_t> token_id;
  std::optional<PositionLogprobs> logprobs;       // of token_id, if asked for
  std::vector<PositionLogprobs> prompt_logprobs;  // the next ones, before the first token
  FinishReason finish = FinishReason::kNone;
  absl::Status error;  // set with kError
  std::int32_t num_preemptions = 0;
  std::int32_t num_cached_tokens = 0;  // of the prompt, found in the prefix cache at first
  // With a finish: the Step() that planned its first rows; InfiniteFuture if there was none.
  absl::Time admitted = absl::InfiniteFuture();
  std::int32_t output_index = 0;  // of token_id among the output, resumed tokens included
  // Of a request that receives: what it needs is reserved on all ranks.
  struct KvReserved {
    std::uint64_t transfer = 0;
    std::int64_t first_position = 0;  // what is before is here
  };
  std::optional<KvReserved> kv_reserved;
  std::string kv_failure;                 // likewise: why its prompt is computed here after all
  std::optional<absl::Duration> kv_took;  // a transfer is done
};

// Results of one step: the tokens of its sampled rows, in the order of the plan. A request that got
// kNotANumber or kNoTokenLeft ends with kError (INTERNAL, INVALID_ARGUMENT).
struct StepResult {
  std::uint64_t step = 0;
  absl::Span<const std::int32_t> token_ids;  // valid during Engine::Step(), as is the next
  // In the plan's order, of every scored row and of the sampled rows of requests with logprobs;
  // moved from.
  absl::Span<PositionLogprobs> logprobs;
};

struct EngineStats {
  std::int32_t num_running = 0;
  std::int32_t peak_running = 0;
  std::int32_t num_waiting = 0;
  std::int32_t num_blocks = 0;
  std::int32_t num_free_blocks = 0;    // held by no request; may be cached
  std::int32_t num_cached_blocks = 0;  // held or not
  // Tokens of requests, without those whose prompt is scored, that were looked up in the prefix
  // cache at their first admission, and of these, found.
  std::uint64_t prefix_cache_queries = 0;
  std::uint64_t prefix_cache_hits = 0;
  std::uint64_t prefix_cache_evictions = 0;  // blocks
  std::int64_t kv_tokens = 0;  // positions of running sequences; shared ones count for each
  std::uint64_t num_preemptions = 0;
  std::uint64_t kv_expired = 0;  // transfers that ended with their lease
  std::uint64_t prompt_tokens = 0;
  std::uint64_t generation_tokens = 0;
  std::uint64_t steps = 0;
};

// The decisions of a group: admission, scheduling, preemption, finishing, KV blocks.
//
// Pure: no thread, clock, lock, gRPC or CUDA. One thread owns it. Work per step is bounded by its
// rows, max_num_seqs and what the inbox holds; nothing allocates in a steady state.
//
// Scheduling of a step: cancelled and expired requests leave first; then every running decode gets
// its row; then prompts continue or start in chunks under max_num_batched_tokens, by (priority,
// arrival). Where decodes and prompts want more rows than there are, prompts get a quarter and
// decodes take turns for the rest. A request is admitted, with all blocks of its prompt, when one
// more would still fit above a small watermark (1 % of the pool), or when nothing else runs; nobody
// overtakes the head of the queue, which waits a step if the blocks it wants next are computed in
// this one. When a decode finds no free block, it waits if some sequence is
// at its last token; else the youngest running sequence of the least important priority is
// preempted: it gives up its blocks, goes back to the head of the queue and is recomputed; one that
// was preempted makes progress (a new token) before it can be preempted again. A single sequence
// always fits: Create() and CheckRequest() refuse what could not. Rows with logits are at most
// max_num_seqs in a step: a prompt with logprobs goes in chunks of what the others leave of them.
//
// Prefix caching: full blocks of whatever was computed, prompts and outputs, are found by a hash of
// all tokens up to their end (block_manager.h). A request starts behind the blocks of its that are
// found, at its last token at the latest, and a preempted one likewise. One whose prompt is still
// to be scored needs every row and starts at 0. Where two requests computed equal blocks, both go
// on with the one stored first.
//
// Hand-off between groups: a request that receives is admitted as any other and holds its slot and
// blocks; one that sends holds them until every rank's part was taken. Neither is preempted before
// its transfer is over. A transfer that fails, or makes no progress for kv_lease, ends: who
// receives computes the prompt itself, in the blocks it has; who sends ends with kError
// (UNAVAILABLE). So does at once who cannot start to send because everything that runs receives:
// it may be what they wait for.
class Engine {
 public:
  // INVALID_ARGUMENT when a sequence of max_model_len does not fit num_blocks, or for an option out
  // of range.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;

  // Any thread.
  virtual const EngineOptions& options() const = 0;

  // Queues a request that has passed CheckRequest(). RESOURCE_EXHAUSTED when there are
  // max_num_seqs + max_num_waiting: whether some of them could run by now does not matter, so that
  // as many may come at once. ALREADY_EXISTS for an id in use. Generation ends with kLength at
  // max_tokens or at max_model_len. A request whose resumed tokens end it is finished at once: its event is there
  // already. With resumed tokens the prompt's logprobs are not told again: they come before the
  // first token.
  virtual absl::Status Add(EngineRequest request, absl::Time now) = 0;

  // Ends a request with kAborted (its event comes from the next Step()); unknown ids are ignored.
  virtual void Cancel(RequestId id) = 0;

  // Lets a request that receives go on: with the first token, once the KV is there; with a
  // `failure`, by computing its prompt. Ids that are unknown or do not wait for it are ignored.
  virtual void ContinueKv(RequestId id, std::optional<std::int32_t> first_token,
                          std::string failure) = 0;
  // What a rank says of a transfer; unknown ones are ignored.
  virtual void OnKvReport(const KvReport& report) = 0;

  // Takes the results of the oldest step in flight (one at most), then plans the next step if one
  // may start: at most 1 step in flight, 2 with async_scheduling. Returns the plan, valid until the
  // next call, or null when there is nothing to run now. Plans come with consecutive step numbers.
  // With async_scheduling call it again, without a result, as soon as a plan is on its way.
  virtual const StepPlan* Step(absl::Time now, std::optional<StepResult> result) = 0;

  // News since the last call, in order. Clears it; the span is valid until the next call of any
  // method.
  virtual absl::Span<const TokenEvent> TakeEvents() = 0;

  // What the prefix cache has stored and removed since the last call, in order; call it from step
  // to step. The span is valid until the next call of any method.
  virtual absl::Span<const BlockChange> TakeBlockChanges() = 0;

  // The earliest deadline among requests; InfiniteFuture without one.
  virtual absl::Time NextDeadline() const = 0;
  // True when the owner should go on without news: no step in flight, and waiting or running
  // requests (Step() then plans or ends some) or events that nobody took.
  virtual bool HasWork() const = 0;
  virtual EngineStats Stats() const = 0;
  // Sets `lengths` to the number of positions with KV of each running sequence, in no order.
  virtual void GetKvLengths(std::vector<std::int64_t>& lengths) const = 0;
};

}  // namespace weft
