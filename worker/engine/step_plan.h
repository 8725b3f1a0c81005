#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/engine/logits_params.h"

namespace weft {

enum class BlockId : std::int32_t {};

// Sampling of one sequence, as ranks need it. Trivially copyable: it travels in plans.
struct SamplingParams {
  float temperature = 1.0f;  // 0 is greedy
  float top_p = 1.0f;        // (0, 1]; 1 is off
  std::int32_t top_k = 0;    // 0 is off
  float min_p = 0;           // [0, 1]; of the most probable token's probability; 0 is off
  std::uint64_t seed = 0;
  bool whole_row = false;  // the leader has LogitsParams that concern sampled rows

  bool HasFilter() const { return temperature > 0 && (top_p < 1 || top_k > 0 || min_p > 0); }
  // Such rows are gathered whole on the leader, on devices with `whole_row` only; the others need
  // one candidate a rank.
  bool NeedsWholeRow() const { return whole_row || HasFilter(); }
  friend bool operator==(const SamplingParams&, const SamplingParams&) = default;
};

// INVALID_ARGUMENT, naming the field, what was seen and what is allowed.
absl::Status ValidateSampling(const SamplingParams& params);

// Rows of one sequence in a step: consecutive positions, whose tokens are consecutive in
// StepPlan::token_ids.
struct PlanSequence {
  std::int32_t slot = 0;            // row of the ranks' block tables, in [0, max_num_seqs)
  std::int32_t num_rows = 0;        // >= 1
  std::int64_t first_position = 0;  // global position of the first row
  std::int32_t num_sampled = 0;     // the last this many rows get a token each; 0 inside a prompt
  // This many rows before those are scored: the leader tells the log-probability of the prompt's
  // token that follows each. Scored and sampled rows of a step, those with logits, are together at
  // most max_num_seqs.
  std::int32_t num_scored = 0;
};

// Blocks appended to (or rewritten in) a slot's block table.
struct BlockTableDelta {
  std::int32_t slot = 0;
  std::int32_t first_index = 0;  // index of the first new block in the sequence
  std::int32_t num_blocks = 0;   // this many of StepPlan::delta_blocks, in order
};

struct SamplingDelta {
  std::int32_t slot = 0;
  SamplingParams params;
};

// The leader's own part of a SamplingDelta, for sequences with LogitsParams: not in the message.
struct LogitsDelta {
  std::int32_t slot = 0;
  std::shared_ptr<const LogitsParams> params;
  std::vector<std::int32_t> token_ids;  // prompt and output so far; the last may be a reference
  std::int32_t num_prompt_tokens = 0;
};

// What the ranks do about the KV of a sequence that goes from one group to another, before the rows
// of the step: the order of the steps is what makes it safe. What was planned before has been run,
// so nobody writes any more into a block that a transfer gets; what comes after kClose finds the
// transfer forgotten, so its blocks are anyone's again.
struct KvOp {
  enum class Kind : std::uint8_t {
    kReceive,   // expect [first_position, end_position) and store it in the slot's blocks
    kSend,      // a transfer to `target` begins
    kSendRows,  // positions [first_position, end_position) of the slot are there after this step
    kClose,     // forget the transfer
  };
  Kind kind{};
  bool last = false;  // of kSendRows: nothing follows
  std::int32_t slot = 0;
  std::uint64_t transfer = 0;
  std::int64_t first_position = 0;
  std::int64_t end_position = 0;
  std::shared_ptr<const std::string> target;  // of kSend: a serialized v1::KvTarget
};
inline constexpr std::size_t kMaxKvTargetBytes = std::size_t{1} << 20;

// In the place of a sampled token: the model's output was not a number; LogitsParams exclude every
// token.
inline constexpr std::int32_t kNotANumber = -1;
inline constexpr std::int32_t kNoTokenLeft = -2;

// What every rank does in one step. Holds global positions only; each rank derives owners, slots
// and visible lengths from its ShardLayout. A slot keeps its block table and sampling parameters
// from step to step; deltas are applied before the step's rows run. A slot taken over by another
// sequence is rewritten from index 0.
//
// A token id >= 0 is a token. Below 0, ~id (bitwise not) is an index among the sampled rows of the
// *previous* step, in order: the row reads the token sampled there. The head of the message that
// carries the plan brings those tokens to the followers. A token sampled there may be kNotANumber
// or kNoTokenLeft: a row that refers to it runs as token 0, and the engine drops what it gives.
struct StepPlan {
  std::uint64_t step = 0;  // grows by one per plan, from 1
  std::vector<SamplingDelta> sampling_deltas;
  std::vector<LogitsDelta> logits_deltas;
  std::vector<BlockTableDelta> table_deltas;
  std::vector<std::int32_t> delta_blocks;  // BlockId values, of all table_deltas together
  std::vector<PlanSequence> sequences;
  std::vector<std::int32_t> token_ids;  // [num_rows] of all sequences together
  std::vector<KvOp> kv_ops;             // in this order; a plan may have nothing else

  std::int32_t num_rows() const { return static_cast<std::int32_t>(token_ids.size()); }
  std::int32_t num_sampled_rows() const;
  std::int32_t num_logits_rows() const;  // scored ones, too
  void Clear();                          // keeps capacity: a plan is reused from step to step
};

// What a plan may hold; decoding checks against it.
struct PlanLimits {
  std::int32_t max_num_seqs = 0;
  std::int32_t max_num_batched_tokens = 0;
  std::int32_t max_blocks_per_seq = 0;
  std::int32_t num_blocks = 0;
  std::int32_t vocab_size = 0;
  std::int64_t max_model_len = 0;
};

// The message of one step: the previous step's sampled tokens, then the plan. Flat, little-endian;
// starts with a magic number and kPlanVersion. `out` is overwritten and keeps its capacity.
inline constexpr std::uint32_t kPlanVersion = 3;
void EncodeStep(absl::Span<const std::int32_t> previous_tokens, const StepPlan& plan,
                std::vector<std::byte>& out);

// INVALID_ARGUMENT, naming field and value, for anything that does not fit `limits`: a wrong
// magic, version or length, slots, positions, counts or blocks out of range, a reference past
// `previous_tokens`. Vectors are cleared first and keep their capacity.
// Allocates nothing but for errors and to grow the vectors.
absl::Status DecodeStep(absl::Span<const std::byte> message, const PlanLimits& limits,
                        std::vector<std::int32_t>& previous_tokens, StepPlan& plan);

}  // namespace weft
