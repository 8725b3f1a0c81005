#include "tests/worker/engine/simulated_group.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "gtest/gtest.h"

namespace weft {
namespace {

std::uint64_t ContextAfter(std::uint64_t context, std::int32_t token) {
  context = (context ^ (static_cast<std::uint64_t>(token) + 1)) * 0x9e3779b97f4a7c15;
  return context ^ (context >> 29);
}

}  // namespace

PlanLimits LimitsOf(const EngineOptions& options) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .max_blocks_per_seq = static_cast<std::int32_t>(
              (options.max_model_len + options.block_size - 1) / options.block_size),
          .num_blocks = options.num_blocks,
          .vocab_size = options.vocab_size,
          .max_model_len = options.max_model_len};
}

std::int32_t SimulatedModel::NextToken(std::uint64_t seed,
                                       absl::Span<const std::int32_t> tokens) const {
  std::uint64_t hash = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::int32_t token : tokens) hash = (hash ^ (token + 1)) * 0xff51afd7ed558ccd + 0x2545f491;
  hash ^= hash >> 33;
  hash *= 0xc4ceb9fe1a85ec53;
  hash ^= hash >> 29;
  if (nan_one_in > 0 && (hash >> 40) % nan_one_in == 0) return -1;
  return static_cast<std::int32_t>(hash % vocab_size);
}

std::int32_t SimulatedModel::Sample(std::uint64_t seed, absl::Span<const std::int32_t> tokens,
                                    std::int32_t num_prompt_tokens,
                                    const LogitsParams* params) const {
  std::int32_t token = NextToken(seed, tokens);
  if (token < 0 || params == nullptr) return token;
  if (static_cast<std::int32_t>(tokens.size()) - num_prompt_tokens >= params->min_tokens) {
    return token;
  }
  const auto& held_back = params->ending_tokens;
  for (std::int32_t i = 0; i < vocab_size; ++i, token = (token + 1) % vocab_size) {
    if (std::find(held_back.begin(), held_back.end(), token) == held_back.end()) return token;
  }
  return kNoTokenLeft;
}

void Oracle::Add(const EngineRequest& request) {
  TrueSequence& sequence = sequences_[request.sampling.seed];
  sequence.tokens = request.prompt_token_ids;
  sequence.tokens.insert(sequence.tokens.end(), request.resume_token_ids.begin(),
                         request.resume_token_ids.end());
  sequence.num_prompt_tokens = static_cast<std::int32_t>(request.prompt_token_ids.size());
  sequence.logits = request.logits;
}

absl::Span<const std::int32_t> Oracle::Tokens(std::uint64_t seed, std::size_t length) {
  auto& [tokens, num_prompt_tokens, logits] = sequences_.at(seed);
  while (tokens.size() < length) {
    tokens.push_back(std::max(model_.Sample(seed, tokens, num_prompt_tokens, logits.get()), 0));
  }
  return absl::MakeConstSpan(tokens).first(length);
}

SimulatedGroup::SimulatedGroup(const EngineOptions& options, const SimulatedModel& model,
                               Oracle& oracle)
    : options_(options),
      model_(model),
      oracle_(oracle),
      slots_(options.max_num_seqs),
      memory_(std::size_t{static_cast<std::uint32_t>(options.num_blocks)} * options.block_size) {}

StepResult SimulatedGroup::Execute() {
  // As a follower gets it: through the wire format, with the tokens of the step before.
  std::vector<std::byte> message;
  EncodeStep(previous_tokens_, queue_.front(), message);
  const std::vector<LogitsDelta> logits_deltas = std::move(queue_.front().logits_deltas);
  queue_.pop_front();
  std::vector<std::int32_t> previous_tokens;
  StepPlan plan;
  const absl::Status status = DecodeStep(message, LimitsOf(options_), previous_tokens, plan);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(plan.step, last_step_ + 1);
  last_step_ = plan.step;
  CheckShape(plan);
  ApplyDeltas(plan);
  TakeLogitsDeltas(logits_deltas, previous_tokens);

  for (std::int32_t& token : plan.token_ids) {
    if (token >= 0) continue;
    ++num_references_;
    token = std::max(previous_tokens[~token], 0);
  }
  sampled_tokens_.clear();
  logprobs_.clear();
  std::size_t first_row = 0;
  for (const PlanSequence& sequence : plan.sequences) {
    RunSequence(sequence,
                absl::MakeConstSpan(plan.token_ids).subspan(first_row, sequence.num_rows));
    first_row += sequence.num_rows;
  }
  EXPECT_EQ(static_cast<std::int32_t>(sampled_tokens_.size()), plan.num_sampled_rows());
  previous_tokens_ = sampled_tokens_;
  return {.step = plan.step, .token_ids = sampled_tokens_, .logprobs = absl::MakeSpan(logprobs_)};
}

void SimulatedGroup::TakeLogitsDeltas(absl::Span<const LogitsDelta> deltas,
                                      absl::Span<const std::int32_t> previous_tokens) {
  for (const LogitsDelta& delta : deltas) {
    Slot& slot = slots_[delta.slot];
    EXPECT_TRUE(slot.taken_over) << "a LogitsDelta of a slot that nobody took over";
    slot.logits = delta.params;
    slot.known_tokens = delta.token_ids;
    slot.num_prompt_tokens = delta.num_prompt_tokens;
    std::int32_t& last = slot.known_tokens.back();
    if (last < 0) last = std::max(previous_tokens[~last], 0);
  }
}

void SimulatedGroup::CheckShape(const StepPlan& plan) {
  EXPECT_GT(plan.num_rows(), 0) << "an empty plan";
  std::set<std::int32_t> slots;
  for (const PlanSequence& sequence : plan.sequences) {
    EXPECT_TRUE(slots.insert(sequence.slot).second) << "slot " << sequence.slot << " twice";
    EXPECT_LE(sequence.num_sampled, 1);
  }
  std::set<std::int32_t> delta_slots;
  for (const BlockTableDelta& delta : plan.table_deltas) {
    EXPECT_TRUE(delta_slots.insert(delta.slot).second) << "two deltas of slot " << delta.slot;
    EXPECT_TRUE(slots.contains(delta.slot)) << "a delta without rows";
  }
}

void SimulatedGroup::ApplyDeltas(const StepPlan& plan) {
  for (const SamplingDelta& delta : plan.sampling_deltas) {
    slots_[delta.slot].sampling = delta.params;
    slots_[delta.slot].logits = nullptr;
    slots_[delta.slot].taken_over = true;
  }
  std::size_t first_block = 0;
  for (const BlockTableDelta& delta : plan.table_deltas) {
    Slot& slot = slots_[delta.slot];
    if (slot.taken_over) slot.table.clear();
    ASSERT_LE(delta.first_index, static_cast<std::int32_t>(slot.table.size()));
    if (delta.first_index < static_cast<std::int32_t>(slot.table.size())) ++num_rewrites_;
    slot.table.resize(delta.first_index);
    for (std::int32_t i = 0; i < delta.num_blocks; ++i) {
      slot.table.push_back(plan.delta_blocks[first_block++]);
    }
  }
  CheckWriters(plan);
}

// No block that a sequence writes to in this step is another's, too.
void SimulatedGroup::CheckWriters(const StepPlan& plan) {
  std::map<std::int32_t, std::int32_t> writers;  // block -> slot
  for (const PlanSequence& sequence : plan.sequences) {
    const std::int64_t first = sequence.first_position / options_.block_size;
    const std::int64_t last =
        (sequence.first_position + sequence.num_rows - 1) / options_.block_size;
    const std::vector<std::int32_t>& table = slots_[sequence.slot].table;
    ASSERT_LT(last, static_cast<std::int64_t>(table.size()));
    for (std::int64_t i = first; i <= last; ++i) {
      EXPECT_TRUE(writers.emplace(table[i], sequence.slot).second)
          << "block " << table[i] << " is written twice";
    }
  }
  for (const PlanSequence& sequence : plan.sequences) {
    for (std::int32_t block : slots_[sequence.slot].table) {
      const auto writer = writers.find(block);
      EXPECT_TRUE(writer == writers.end() || writer->second == sequence.slot)
          << "block " << block << " is read and written by two sequences";
    }
  }
}

void SimulatedGroup::RunSequence(const PlanSequence& sequence,
                                 absl::Span<const std::int32_t> tokens) {
  Slot& slot = slots_[sequence.slot];
  if (slot.taken_over) {
    EXPECT_EQ(sequence.first_position % options_.block_size, 0);
    EXPECT_TRUE(options_.enable_prefix_caching || sequence.first_position == 0);
  } else {
    EXPECT_EQ(sequence.first_position, slot.next_position) << "slot " << sequence.slot;
  }
  slot.taken_over = false;
  const std::int64_t end = sequence.first_position + sequence.num_rows;
  ASSERT_LE(end, static_cast<std::int64_t>(slot.table.size()) * options_.block_size);
  for (std::int32_t row = 0; row < sequence.num_rows; ++row) {
    const std::int64_t position = sequence.first_position + row;
    const std::uint64_t before = position == 0 ? 0 : CellOf(slot, position - 1).context;
    CellOf(slot, position) = {
        .position = position, .token = tokens[row], .context = ContextAfter(before, tokens[row])};
  }
  slot.next_position = end;
  const std::int32_t first_sampled = sequence.num_rows - sequence.num_sampled;
  for (std::int32_t row = 0; row < sequence.num_rows; ++row) {
    const std::int64_t position = sequence.first_position + row;
    if (!ReadContext(slot, position)) context_.assign(position + 1, 0);
    if (row >= first_sampled) {
      SampleRow(slot, position);
    } else if (row >= first_sampled - sequence.num_scored) {
      ScoreRow(slot, position);
    }
  }
}

// A score is the position, so that the engine's order of them shows.
void SimulatedGroup::ScoreRow(const Slot& slot, std::int64_t position) {
  ASSERT_TRUE(slot.logits != nullptr && slot.logits->prompt_logprobs.has_value());
  ASSERT_LT(position + 1, slot.num_prompt_tokens);
  const bool nan = model_.NextToken(slot.sampling.seed, context_) < 0;
  logprobs_.push_back({.token = {.token_id = slot.known_tokens[position + 1],
                                 .logprob = nan ? std::nanf("") : static_cast<float>(position)}});
}

void SimulatedGroup::SampleRow(Slot& slot, std::int64_t position) {
  if (slot.logits != nullptr) {
    EXPECT_EQ(slot.known_tokens, context_) << "the leader knows other tokens than the ranks";
  }
  const std::int32_t token =
      model_.Sample(slot.sampling.seed, context_, slot.num_prompt_tokens, slot.logits.get());
  sampled_tokens_.push_back(token);
  if (slot.logits == nullptr) return;
  slot.known_tokens.push_back(std::max(token, 0));
  if (!slot.logits->logprobs.has_value()) return;
  logprobs_.push_back({.token = {.token_id = token, .logprob = static_cast<float>(position)}});
}

// Sets context_ to what a row at `position` sees; false if that is not its sequence's prefix.
bool SimulatedGroup::ReadContext(const Slot& slot, std::int64_t position) {
  context_.clear();
  const std::uint64_t seed = slot.sampling.seed;
  if (!oracle_.Knows(seed)) {
    ADD_FAILURE() << "a row of an unknown sequence";
    return false;
  }
  std::uint64_t context = 0;
  for (std::int64_t p = 0; p <= position; ++p) {
    const Cell& cell = CellOf(slot, p);
    context = ContextAfter(context, cell.token);
    if (cell.position != p || cell.context != context) {
      ADD_FAILURE() << "position " << p << " of sequence " << seed << " holds position "
                    << cell.position << " of another";
      return false;
    }
    context_.push_back(cell.token);
  }
  const absl::Span<const std::int32_t> truth = oracle_.Tokens(seed, context_.size());
  if (!std::equal(truth.begin(), truth.end(), context_.begin())) {
    ADD_FAILURE() << "the context of sequence " << seed << " at position " << position
                  << " is not its prefix";
    return false;
  }
  return true;
}

SimulatedGroup::Cell& SimulatedGroup::CellOf(const Slot& slot, std::int64_t position) {
  const std::int64_t block = slot.table[position / options_.block_size];
  return memory_[block * options_.block_size + position % options_.block_size];
}

}  // namespace weft
