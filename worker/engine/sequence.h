#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "worker/engine/block_manager.h"
#include "worker/engine/engine.h"
#include "worker/engine/kv_handoff.h"
#include "worker/engine/step_plan.h"

namespace weft {

// The order in which requests get what there is.
struct QueueKey {
  std::int32_t priority = 0;
  std::uint64_t arrival = 0;  // grows with each request: no two keys are equal
  friend auto operator<=>(const QueueKey&, const QueueKey&) = default;
};

// A request inside the engine. The first half is what was asked and what came of it; the second is
// the scheduler's.
struct Sequence {
  Sequence(EngineRequest request, std::uint64_t arrival, std::int64_t max_model_len);

  // Appends an output token; the reason if the sequence ends with it. Resumed tokens come before
  // all others.
  FinishReason Append(std::int32_t token_id);

  RequestId id;
  QueueKey key;
  std::vector<std::int32_t> token_ids;  // the prompt, then the output
  std::size_t num_prompt_tokens;
  std::int64_t max_length;                   // tokens at which it ends with kLength
  std::vector<std::int32_t> stop_token_ids;  // sorted
  std::vector<std::int32_t> eos_token_ids;   // sorted; empty with ignore_eos
  SamplingParams sampling;
  std::shared_ptr<const LogitsParams> logits;  // may be null
  absl::Time deadline;
  // server/block_hash.h: of the full blocks whose hash was needed so far. Empty without prefix
  // caching.
  std::vector<BlockHash> hash_chain;
  absl::Time admitted = absl::InfiniteFuture();  // for the first time
  std::int32_t num_preemptions = 0;
  std::int32_t num_cached_tokens = 0;  // of the prompt, found when it was admitted first
  std::unique_ptr<KvHandoff> kv;       // null without a hand-off, and once it is over

  // Waits for the KV of its prompt: nothing is to be computed.
  bool receiving() const { return kv != nullptr && !kv->sends; }
  // Has computed its prompt, and waits until all of it has been taken.
  bool sending() const { return kv != nullptr && kv->sends && ending(); }

  // Tokens it has or is about to get from the step in flight.
  std::int64_t length() const { return static_cast<std::int64_t>(token_ids.size()) + num_pending; }
  std::int32_t num_output() const {
    return static_cast<std::int32_t>(token_ids.size() - num_prompt_tokens);
  }
  // Rows to run before the next token can be sampled; 1 is a decode.
  std::int64_t num_remaining() const { return length() - num_computed; }
  // The step in flight or the plan being made brings its last token: no more rows.
  bool ending() const { return length() + (planned_rows == num_remaining() ? 1 : 0) >= max_length; }

  // Rows among its next `num_rows` that have logits: prompt rows to score, one to sample from.
  std::int32_t NumScored(std::int32_t num_rows) const;
  std::int32_t NumLogits(std::int32_t num_rows) const {
    return NumScored(num_rows) + (num_rows > 0 && num_rows == num_remaining() ? 1 : 0);
  }

  bool running = false;                // else waiting, and what is below is at its defaults
  std::int32_t slot = 0;               // while running
  std::vector<BlockRef> blocks;        // in order of position
  std::int32_t num_sent_blocks = 0;    // of `blocks`, that the ranks know of
  std::int32_t num_stored_blocks = 0;  // of `blocks`, that are in the prefix cache
  bool sampling_sent = false;
  std::int64_t num_computed = 0;  // positions whose rows were in a plan
  std::int32_t planned_rows = 0;  // in the plan being made

  std::int32_t num_pending = 0;    // tokens that steps in flight will bring; also while waiting
  std::int32_t pending_index = 0;  // of the last of them, among the sampled rows of its step
  bool must_progress = false;      // preempted, and no row was sampled since

  // Rows [scored, score_end) of the prompt are still to be scored. Kept over preemptions: none is
  // planned twice. A prompt is scored before anything is sampled, so in a chunk they are the last
  // rows but the sampled one.
  std::int64_t scored = 0;
  std::int64_t score_end = 0;
};

}  // namespace weft
