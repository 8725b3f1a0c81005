#include "worker/model/rank_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "fmt/format.h"
#include "kernels/elementwise.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::int64_t kFloat = sizeof(float);

}  // namespace

std::int64_t RankRunner::MaxCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                            const RunnerOptions& options) {
  const std::int64_t tp = layout.tensor_parallel_size();
  const std::int64_t hidden =
      static_cast<std::int64_t>(options.max_num_batched_tokens) * config.hidden_size * kFloat;
  const std::int64_t whole_rows = tp * options.max_num_seqs *
                                  CeilDiv(config.vocab_size, layout.tensor_parallel_size()) *
                                  kFloat;
  return std::max(hidden, whole_rows);
}

RankRunner::RankRunner(const ModelConfig& config, const ShardLayout& layout,
                       const DecoderWeights& weights, Communicator& world,
                       const RunnerOptions& options, kernels::Stream& stream,
                       std::unique_ptr<AttentionLayer> attention)
    : config_(config),
      layout_(layout),
      weights_(weights),
      world_(world),
      options_(options),
      stream_(stream),
      rope_(ComputeRopeFrequencies(config.rope, config.rotary_dim)),
      vocab_(layout.Slice(config.vocab_size)),
      padded_vocab_(CeilDiv(config.vocab_size, layout.tensor_parallel_size())),
      attention_(std::move(attention)),
      slots_(options.max_num_seqs,
             static_cast<std::int32_t>((options.max_model_len + layout.block_size() - 1) /
                                       layout.block_size())),
      rows_(options.max_num_batched_tokens),
      sampler_(config.vocab_size) {}

absl::StatusOr<std::unique_ptr<RankRunner>> RankRunner::Create(
    const ModelConfig& config, const ShardLayout& layout, const DecoderWeights& weights,
    KvCache& cache, Communicator& world, Communicator& dcp, const RunnerOptions& options,
    kernels::Stream& stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionLayer> attention,
                   MakeAttentionLayer(config, layout,
                                      {.max_rows = options.max_num_batched_tokens,
                                       .exchange = options.exchange,
                                       .mla_form = options.mla_form},
                                      cache, dcp, stream));
  std::unique_ptr<RankRunner> runner(
      new RankRunner(config, layout, weights, world, options, stream, std::move(attention)));
  if (config.moe.has_value()) {
    ASSIGN_OR_RETURN(runner->moe_,
                     MoeLayer::Create(config, weights, options.max_num_batched_tokens));
  }
  RETURN_IF_ERROR(runner->AllocateWorkspace());
  return runner;
}

absl::Status RankRunner::AllocateWorkspace() {
  const std::int64_t rows = options_.max_num_batched_tokens;
  const std::int64_t sampled = options_.max_num_seqs;
  std::int32_t intermediate = 0;  // of any layer's MLP
  for (const DecoderLayerWeights& layer : weights_.layers) {
    intermediate = std::max(intermediate, layer.down.in_features());
  }
  const std::int64_t tp = layout_.tensor_parallel_size();
  using kernels::Buffer;
  ASSIGN_OR_RETURN(x_, Buffer::Allocate(rows * config_.hidden_size * kFloat));
  ASSIGN_OR_RETURN(normed_, Buffer::Allocate(rows * config_.hidden_size * kFloat));
  ASSIGN_OR_RETURN(gate_up_, Buffer::Allocate(rows * 2 * intermediate * kFloat));
  ASSIGN_OR_RETURN(activated_, Buffer::Allocate(rows * intermediate * kFloat));
  ASSIGN_OR_RETURN(rope_tables_, Buffer::Allocate(4 * rows * config_.rotary_dim / 2 * kFloat));
  ASSIGN_OR_RETURN(logits_, Buffer::Allocate(sampled * padded_vocab_ * kFloat));
  ASSIGN_OR_RETURN(whole_send_, Buffer::Allocate(sampled * padded_vocab_ * kFloat));
  if (layout_.rank() == 0) {
    ASSIGN_OR_RETURN(whole_rows_, Buffer::Allocate(tp * sampled * padded_vocab_ * kFloat));
    ASSIGN_OR_RETURN(whole_row_, Buffer::Allocate(sampled * config_.vocab_size * kFloat));
    ASSIGN_OR_RETURN(processed_, Buffer::Allocate(config_.vocab_size * kFloat));
    processors_.resize(sampled);
  }
  token_ids_.resize(rows);
  temperature_.resize(sampled);
  seed_.resize(sampled);
  sample_position_.resize(sampled);
  best_.resize(sampled);
  all_best_.resize(tp * sampled);
  whole_index_.reserve(sampled);
  logits_rows_.reserve(sampled);
  sampled_tokens_.reserve(sampled);
  return absl::OkStatus();
}

std::int64_t RankRunner::workspace_bytes() const {
  std::int64_t bytes = attention_->workspace_bytes();
  if (moe_.has_value()) bytes += moe_->workspace_bytes();
  for (const kernels::Buffer* buffer :
       {&x_, &normed_, &gate_up_, &activated_, &rope_tables_, &logits_, &whole_send_, &whole_rows_,
        &whole_row_, &processed_}) {
    bytes += buffer->size_bytes();
  }
  return bytes;
}

void RankRunner::PrepareStep(const StepPlan& plan, absl::Span<const std::int32_t> previous_tokens) {
  slots_.Apply(plan);
  TakeLogitsDeltas(plan, previous_tokens);
  rows_.Build(plan, slots_, layout_, config_.sliding_window);
  for (std::int32_t i = 0; i < plan.num_rows(); ++i) {
    const std::int32_t id = plan.token_ids[i];
    // A row after a failed one (-1) runs as token 0; the engine drops its result.
    token_ids_[i] = id >= 0 ? id : std::max(0, previous_tokens[~id]);
  }

  // cos and sin of all rows, then those of the owned rows again, packed.
  const std::int32_t half = config_.rotary_dim / 2;
  const std::int64_t table = static_cast<std::int64_t>(options_.max_num_batched_tokens) * half;
  float* cos = rope_tables_.as<float>();
  float* sin = cos + table;
  for (std::int32_t i = 0; i < rows_.num_rows(); ++i) {
    const auto position = static_cast<float>(rows_.position[i]);
    for (std::int32_t j = 0; j < half; ++j) {
      const float angle = position * rope_.inv_freq[j];
      cos[i * half + j] = std::cos(angle) * rope_.attention_scaling;
      sin[i * half + j] = std::sin(angle) * rope_.attention_scaling;
    }
  }
  for (std::size_t i = 0; i < rows_.owned_row.size(); ++i) {
    const std::int32_t row = rows_.owned_row[i];
    std::memcpy(cos + 2 * table + i * half, cos + row * half, half * kFloat);
    std::memcpy(cos + 3 * table + i * half, sin + row * half, half * kFloat);
  }
}

absl::Status RankRunner::RunMlp(std::int32_t layer) {
  const DecoderLayerWeights& weights = weights_.layers[layer];
  const std::int32_t intermediate = weights.down.in_features();
  const std::int32_t num_rows = rows_.num_rows();
  RETURN_IF_ERROR(kernels::RmsNorm({.x = x_.as<float>(),
                                    .weight = weights.post_attention_norm.data(),
                                    .out = normed_.as<float>(),
                                    .num_rows = num_rows,
                                    .size = config_.hidden_size,
                                    .eps = config_.rms_norm_eps},
                                   stream_));
  // Rank 0 adds the residual, the sum over ranks brings it everywhere.
  const float* residual = layout_.rank() == 0 ? x_.as<float>() : nullptr;
  if (config_.HasExperts(layer)) {
    RETURN_IF_ERROR(
        moe_->Run(weights.moe, normed_.as<float>(), residual, x_.as<float>(), num_rows, stream_));
    residual = x_.as<float>();
  }
  if (intermediate > 0) RETURN_IF_ERROR(RunDenseMlp(weights, residual));
  return world_.AllReduceSum(x_.as<float>(),
                             static_cast<std::int64_t>(num_rows) * config_.hidden_size,
                             DType::kFloat32, stream_);
}

absl::Status RankRunner::RunDenseMlp(const DecoderLayerWeights& weights, const float* residual) {
  const std::int32_t intermediate = weights.down.in_features();
  const std::int32_t num_rows = rows_.num_rows();
  RETURN_IF_ERROR(kernels::Linear({.x = normed_.as<float>(),
                                   .weight = &weights.gate_up,
                                   .bias = OrNull(weights.gate_up_bias),
                                   .residual = nullptr,
                                   .y = gate_up_.as<float>(),
                                   .num_rows = num_rows,
                                   .x_stride = config_.hidden_size,
                                   .y_stride = 2 * intermediate},
                                  stream_));
  RETURN_IF_ERROR(kernels::SiluMul({.gate_up = gate_up_.as<float>(),
                                    .out = activated_.as<float>(),
                                    .num_rows = num_rows,
                                    .size = intermediate},
                                   stream_));
  return kernels::Linear({.x = activated_.as<float>(),
                          .weight = &weights.down,
                          .bias = OrNull(weights.down_bias),
                          .residual = residual,
                          .y = x_.as<float>(),
                          .num_rows = num_rows,
                          .x_stride = intermediate,
                          .y_stride = config_.hidden_size},
                         stream_);
}

absl::Status RankRunner::RunLayers() {
  const std::int32_t num_rows = rows_.num_rows();
  const std::int64_t x_count = static_cast<std::int64_t>(num_rows) * config_.hidden_size;
  const std::int64_t table =
      static_cast<std::int64_t>(options_.max_num_batched_tokens) * config_.rotary_dim / 2;
  const float* cos = rope_tables_.as<float>();
  const AttentionStep step{.rows = rows_,
                           .slots = slots_,
                           .cos = cos,
                           .sin = cos + table,
                           .owned_cos = cos + 2 * table,
                           .owned_sin = cos + 3 * table};

  RETURN_IF_ERROR(kernels::Embedding({.weight = &weights_.embedding,
                                      .ids = token_ids_.data(),
                                      .out = x_.as<float>(),
                                      .num_rows = num_rows,
                                      .first_row = vocab_.begin},
                                     stream_));
  RETURN_IF_ERROR(world_.AllReduceSum(x_.as<float>(), x_count, DType::kFloat32, stream_));

  attention_->BeginStep(step);
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const DecoderLayerWeights& weights = weights_.layers[layer];
    RETURN_IF_ERROR(kernels::RmsNorm({.x = x_.as<float>(),
                                      .weight = weights.input_norm.data(),
                                      .out = normed_.as<float>(),
                                      .num_rows = num_rows,
                                      .size = config_.hidden_size,
                                      .eps = config_.rms_norm_eps},
                                     stream_));
    RETURN_IF_ERROR(attention_->Run(layer, weights, step, normed_.as<float>(),
                                    layout_.rank() == 0 ? x_.as<float>() : nullptr, x_.as<float>(),
                                    stream_));
    if (options_.observer != nullptr) options_.observer->OnLayerStored(layer);
    RETURN_IF_ERROR(world_.AllReduceSum(x_.as<float>(), x_count, DType::kFloat32, stream_));
    RETURN_IF_ERROR(RunMlp(layer));
    if (options_.progress != nullptr) options_.progress->fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status RankRunner::ComputeLogits() {
  const auto num_sampled = static_cast<std::int32_t>(rows_.logits_row.size());
  // The layers are done: normed_ is free for the rows with logits.
  float* sampled_x = normed_.as<float>();
  RETURN_IF_ERROR(kernels::GatherRows({.in = x_.as<float>(),
                                       .index = rows_.logits_row.data(),
                                       .out = sampled_x,
                                       .num_rows = num_sampled,
                                       .size = config_.hidden_size},
                                      stream_));
  RETURN_IF_ERROR(kernels::RmsNorm({.x = sampled_x,
                                    .weight = weights_.final_norm.data(),
                                    .out = sampled_x,
                                    .num_rows = num_sampled,
                                    .size = config_.hidden_size,
                                    .eps = config_.rms_norm_eps},
                                   stream_));
  return kernels::Linear({.x = sampled_x,
                          .weight = &weights_.head(),
                          .bias = nullptr,
                          .residual = nullptr,
                          .y = logits_.as<float>(),
                          .num_rows = num_sampled,
                          .x_stride = config_.hidden_size,
                          .y_stride = padded_vocab_},
                         stream_);
}

absl::Status RankRunner::GatherWholeRows() {
  const auto num_whole = static_cast<std::int64_t>(whole_index_.size());
  if (num_whole == 0) return absl::OkStatus();
  const std::int64_t row_bytes = padded_vocab_ * kFloat;
  RETURN_IF_ERROR(kernels::GatherRows({.in = logits_.as<float>(),
                                       .index = whole_index_.data(),
                                       .out = whole_send_.as<float>(),
                                       .num_rows = static_cast<std::int32_t>(num_whole),
                                       .size = padded_vocab_},
                                      stream_));
  RETURN_IF_ERROR(
      world_.Gather(whole_send_.data(), whole_rows_.data(), num_whole * row_bytes, stream_));
  if (layout_.rank() != 0) return absl::OkStatus();

  for (std::int64_t i = 0; i < num_whole; ++i) {
    float* row = whole_row_.as<float>() + i * config_.vocab_size;
    for (std::int32_t r = 0; r < layout_.tensor_parallel_size(); ++r) {
      const IndexRange slice = layout_.Slice(config_.vocab_size, r);
      std::memcpy(row + slice.begin, whole_rows_.as<float>() + (r * num_whole + i) * padded_vocab_,
                  slice.size() * kFloat);
    }
  }
  return absl::OkStatus();
}

void RankRunner::TakeLogitsDeltas(const StepPlan& plan,
                                  absl::Span<const std::int32_t> previous_tokens) {
  if (layout_.rank() != 0) return;
  for (const SamplingDelta& delta : plan.sampling_deltas) processors_[delta.slot].Clear();
  for (const LogitsDelta& delta : plan.logits_deltas) {
    absl::Span<const std::int32_t> tokens = delta.token_ids;
    std::int32_t pending = 0;
    if (tokens.back() < 0) {
      pending = std::max(0, previous_tokens[~tokens.back()]);
      tokens.remove_suffix(1);
    }
    LogitsProcessor& processor = processors_[delta.slot];
    processor.Start(delta.params, tokens, delta.num_prompt_tokens);
    if (tokens.size() < delta.token_ids.size()) processor.Append(pending);
  }
}

void RankRunner::ListLogitsRows(const StepPlan& plan) {
  logits_rows_.clear();
  whole_index_.clear();
  for (const PlanSequence& sequence : plan.sequences) {
    const SamplingParams& params = slots_.sampling(sequence.slot);
    for (std::int32_t i = 0; i < sequence.num_scored + sequence.num_sampled; ++i) {
      const auto index = static_cast<std::int32_t>(logits_rows_.size());
      const bool sampled = i >= sequence.num_scored;
      if (options_.gather_all_logits || !sampled || params.NeedsWholeRow()) {
        whole_index_.push_back(index);
      }
      logits_rows_.push_back({.slot = sequence.slot, .sampled = sampled});
      temperature_[index] = params.temperature;
      seed_[index] = params.seed;
      sample_position_[index] = rows_.position[rows_.logits_row[index]] + 1;
    }
  }
}

absl::Status RankRunner::SampleRows(const StepPlan& plan) {
  ListLogitsRows(plan);
  const auto num_rows = static_cast<std::int32_t>(logits_rows_.size());
  RETURN_IF_ERROR(kernels::GumbelArgmax({.logits = logits_.as<float>(),
                                         .temperature = temperature_.data(),
                                         .seed = seed_.data(),
                                         .position = sample_position_.data(),
                                         .out = best_.data(),
                                         .logits_stride = padded_vocab_,
                                         .num_rows = num_rows,
                                         .vocab_size = vocab_.size(),
                                         .first_token_id = vocab_.begin},
                                        stream_));
  RETURN_IF_ERROR(world_.Gather(best_.data(), all_best_.data(),
                                num_rows * static_cast<std::int64_t>(sizeof(kernels::ArgmaxResult)),
                                stream_));
  RETURN_IF_ERROR(GatherWholeRows());
  return layout_.rank() == 0 ? FinishRows() : absl::OkStatus();
}

absl::Status RankRunner::FinishRows() {
  const auto num_rows = static_cast<std::int32_t>(logits_rows_.size());
  for (std::int32_t i = 0; i < num_rows; ++i) {
    const auto [slot, sampled] = logits_rows_[i];
    LogitsProcessor& processor = processors_[slot];
    const LogitsParams* params = processor.params();
    if (!sampled) {
      logprobs_.push_back(LogprobsOf(Logits(i), LogSumExp(i),
                                     processor.prompt_token(sample_position_[i]),
                                     *params->prompt_logprobs));
      continue;
    }
    std::int32_t token = Sampler::Best(&all_best_[i], layout_.tensor_parallel_size(), num_rows);
    if (token >= 0 && slots_.sampling(slot).NeedsWholeRow()) {
      ASSIGN_OR_RETURN(token, SampleWholeRow(i));
    }
    sampled_tokens_.push_back(token);
    if (params == nullptr) continue;
    if (params->logprobs.has_value()) {
      PositionLogprobs logprobs;
      if (token >= 0) logprobs = LogprobsOf(Logits(i), LogSumExp(i), token, *params->logprobs);
      logprobs_.push_back(std::move(logprobs));
    }
    if (token >= 0) processor.Append(token);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int32_t> RankRunner::SampleWholeRow(std::int32_t index) {
  const std::int32_t slot = logits_rows_[index].slot;
  const SamplingParams& sampling = slots_.sampling(slot);
  absl::Span<const float> logits = Logits(index);
  const LogitsParams* params = processors_[slot].params();
  if (params != nullptr && params->ChangesLogits()) {
    const absl::Span<float> processed(processed_.as<float>(), logits.size());
    std::copy(logits.begin(), logits.end(), processed.begin());
    processors_[slot].Process(processed);
    logits = processed;
  }
  std::int32_t token = 0;
  if (sampling.HasFilter()) {
    token = sampler_.Sample(logits, sampling, sample_position_[index]);
  } else {
    kernels::ArgmaxResult best;
    RETURN_IF_ERROR(kernels::GumbelArgmax({.logits = logits.data(),
                                           .temperature = &sampling.temperature,
                                           .seed = &sampling.seed,
                                           .position = &sample_position_[index],
                                           .out = &best,
                                           .logits_stride = config_.vocab_size,
                                           .num_rows = 1,
                                           .vocab_size = config_.vocab_size,
                                           .first_token_id = 0},
                                          stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    token = best.token_id;
  }
  if (token >= 0 && logits[token] == -std::numeric_limits<float>::infinity()) return kNoTokenLeft;
  return token;
}

// Of the raw logits of a row: from the ranks' own.
double RankRunner::LogSumExp(std::int32_t index) const {
  const std::size_t num_rows = logits_rows_.size();
  const std::size_t end = num_rows * layout_.tensor_parallel_size();
  double highest = -std::numeric_limits<double>::infinity();
  for (std::size_t i = index; i < end; i += num_rows) {
    highest = std::max(highest, double{all_best_[i].logsumexp});
  }
  double sum = 0;
  for (std::size_t i = index; i < end; i += num_rows) {
    sum += std::exp(all_best_[i].logsumexp - highest);
  }
  return highest + std::log(sum);
}

absl::Span<const float> RankRunner::Logits(std::int32_t index) const {
  const auto at =
      std::lower_bound(whole_index_.begin(), whole_index_.end(), index) - whole_index_.begin();
  return {whole_row_.as<float>() + at * config_.vocab_size,
          static_cast<std::size_t>(config_.vocab_size)};
}

absl::Status RankRunner::CheckPlanIsEverywhere([[maybe_unused]] const StepPlan& plan) {
#ifndef NDEBUG
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto mix = [&hash](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
  };
  mix(static_cast<std::int64_t>(plan.step));
  for (const PlanSequence& s : plan.sequences) {
    for (std::int64_t value : {std::int64_t{s.slot}, std::int64_t{s.num_rows}, s.first_position,
                               std::int64_t{s.num_sampled}, std::int64_t{s.num_scored}}) {
      mix(value);
    }
  }
  for (std::int32_t i = 0; i < plan.num_rows(); ++i) mix(token_ids_[i]);
  for (std::int32_t block : plan.delta_blocks) mix(block);
  std::vector<std::uint64_t> all(world_.size());
  RETURN_IF_ERROR(world_.AllGather(&hash, all.data(), sizeof(hash), stream_));
  for (std::size_t r = 0; r < all.size(); ++r) {
    CHECK_MSG(all[r] == hash, fmt::format("step {}: rank {} runs another plan than rank {}",
                                          plan.step, r, layout_.rank()));
  }
#endif
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> RankRunner::Execute(const StepPlan& plan,
                                               absl::Span<const std::int32_t> previous_tokens) {
  const std::int32_t num_logits = plan.num_logits_rows();
  CHECK(plan.num_rows() <= options_.max_num_batched_tokens && num_logits <= options_.max_num_seqs);
  sampled_tokens_.clear();
  logprobs_.clear();
  PrepareStep(plan, previous_tokens);
  RETURN_IF_ERROR(CheckPlanIsEverywhere(plan));
  if (options_.observer != nullptr) options_.observer->OnStepBegin(plan, slots_);
  if (plan.num_rows() > 0) {
    RETURN_IF_ERROR(RunLayers());
  } else {
    // Nobody is told of more plans than there is room for: a step ends when all have begun it.
    RETURN_IF_ERROR(world_.AllGather(nullptr, nullptr, 0, stream_));
  }
  if (num_logits > 0) {
    RETURN_IF_ERROR(ComputeLogits());
    RETURN_IF_ERROR(SampleRows(plan));
  }
  RETURN_IF_ERROR(stream_.Synchronize());
  if (options_.observer != nullptr) options_.observer->OnStepEnd();
  return StepOutput{.token_ids = sampled_tokens_, .logprobs = absl::MakeSpan(logprobs_)};
}

}  // namespace weft
