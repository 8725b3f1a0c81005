// What RankRunner does with rows that have logits.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/elementwise.h"
#include "server/base/status_macros.h"
#include "worker/model/rank_runner.h"

namespace weft {
namespace {

constexpr std::int64_t kFloat = sizeof(float);

}  // namespace

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
  filtered_index_.clear();
  for (const PlanSequence& sequence : plan.sequences) {
    const SamplingParams& params = slots_.sampling(sequence.slot);
    for (std::int32_t i = 0; i < sequence.num_scored + sequence.num_sampled; ++i) {
      const auto index = static_cast<std::int32_t>(logits_rows_.size());
      const bool sampled = i >= sequence.num_scored;
      const bool filtered = sampled && FiltersOnDevice(params);
      if (filtered) filtered_index_.push_back(index);
      if (options_.gather_all_logits || !sampled || (params.NeedsWholeRow() && !filtered)) {
        whole_index_.push_back(index);
      }
      logits_rows_.push_back({.slot = sequence.slot, .sampled = sampled});
      temperature_.host()[index] = params.temperature;
      seed_.host()[index] = params.seed;
      sample_position_.host()[index] = rows_.position[rows_.logits_row[index]] + 1;
    }
  }
}

absl::Status RankRunner::SendSampling() {
  for (auto i = static_cast<std::int32_t>(logits_rows_.size()); i < launched_.logits; ++i) {
    temperature_.host()[i] = 0;
    seed_.host()[i] = 0;
    sample_position_.host()[i] = 0;
  }
  RETURN_IF_ERROR(temperature_.Send(launched_.logits, stream_));
  RETURN_IF_ERROR(seed_.Send(launched_.logits, stream_));
  return sample_position_.Send(launched_.logits, stream_);
}

absl::Status RankRunner::DrawTokens() {
  return kernels::GumbelArgmax({.logits = logits_.as<float>(),
                                .temperature = temperature_.data(),
                                .seed = seed_.data(),
                                .position = sample_position_.data(),
                                .out = best_.data(),
                                .logits_stride = padded_vocab_,
                                .num_rows = launched_.logits,
                                .vocab_size = vocab_.size(),
                                .first_token_id = vocab_.begin},
                               stream_);
}

absl::Status RankRunner::SampleRows() {
  const auto num_rows = static_cast<std::int32_t>(logits_rows_.size());
  RETURN_IF_ERROR(best_.Fetch(num_rows, stream_));
  RETURN_IF_ERROR(DrawFiltered());
  RETURN_IF_ERROR(stream_.Synchronize());
  RETURN_IF_ERROR(world_.Gather(best_.host(), all_best_.data(),
                                num_rows * static_cast<std::int64_t>(sizeof(kernels::ArgmaxResult)),
                                host_));
  RETURN_IF_ERROR(GatherWholeRows());
  return layout_.rank() == 0 ? FinishRows() : absl::OkStatus();
}

absl::Status RankRunner::DrawFiltered() {
  const auto count = static_cast<std::int32_t>(filtered_index_.size());
  if (count == 0) return absl::OkStatus();
  RETURN_IF_ERROR(whole_index_for_kernels_.Send(filtered_index_, stream_));
  float* const logits = filtered_logits_.as<float>();
  const std::int64_t of_rank = std::int64_t{count} * padded_vocab_;
  float* const own = logits + layout_.rank() * of_rank;
  RETURN_IF_ERROR(kernels::GatherRows({.in = logits_.as<float>(),
                                       .index = whole_index_for_kernels_.data(),
                                       .out = own,
                                       .num_rows = count,
                                       .size = padded_vocab_},
                                      stream_));
  RETURN_IF_ERROR(world_.AllGather(own, logits, of_rank * kFloat, stream_));
  if (layout_.rank() != 0) return absl::OkStatus();
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t index = filtered_index_[i];
    const SamplingParams& params = slots_.sampling(logits_rows_[index].slot);
    filtered_rows_.host()[i] = {.seed = params.seed,
                                .position = sample_position_.host()[index],
                                .log_min_p = std::log(double{params.min_p}),
                                .temperature = params.temperature,
                                .top_p = params.top_p,
                                .top_k = params.top_k};
  }
  RETURN_IF_ERROR(filtered_rows_.Send(count, stream_));
  RETURN_IF_ERROR(kernels::OnDevice(stream_)->FilteredSample({.logits = logits,
                                                              .rows = filtered_rows_.data(),
                                                              .out = filtered_.data(),
                                                              .logits_stride = padded_vocab_,
                                                              .num_slices = world_.size(),
                                                              .num_rows = count,
                                                              .vocab_size = config_.vocab_size}));
  return filtered_.Fetch(count, stream_);
}

absl::Status RankRunner::GatherWholeRows() {
  const auto num_whole = static_cast<std::int64_t>(whole_index_.size());
  if (num_whole == 0) return absl::OkStatus();
  const std::int64_t row_bytes = padded_vocab_ * kFloat;
  RETURN_IF_ERROR(whole_index_for_kernels_.Send(whole_index_, stream_));
  RETURN_IF_ERROR(kernels::GatherRows({.in = logits_.as<float>(),
                                       .index = whole_index_for_kernels_.data(),
                                       .out = whole_send_.data(),
                                       .num_rows = static_cast<std::int32_t>(num_whole),
                                       .size = padded_vocab_},
                                      stream_));
  RETURN_IF_ERROR(whole_send_.Fetch(num_whole * padded_vocab_, stream_));
  RETURN_IF_ERROR(stream_.Synchronize());
  RETURN_IF_ERROR(
      world_.Gather(whole_send_.host(), whole_rows_.data(), num_whole * row_bytes, host_));
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

absl::Status RankRunner::FinishRows() {
  const auto num_rows = static_cast<std::int32_t>(logits_rows_.size());
  const kernels::FilteredToken* filtered = filtered_.host();
  for (std::int32_t i = 0; i < num_rows; ++i) {
    const auto [slot, sampled] = logits_rows_[i];
    LogitsProcessor& processor = processors_[slot];
    const LogitsParams* params = processor.params();
    if (!sampled) {
      logprobs_.push_back(LogprobsOf(Logits(i), LogSumExp(i),
                                     processor.prompt_token(sample_position_.host()[i]),
                                     *params->prompt_logprobs));
      continue;
    }
    std::int32_t token = Sampler::Best(&all_best_[i], layout_.tensor_parallel_size(), num_rows);
    const SamplingParams& sampling = slots_.sampling(slot);
    if (FiltersOnDevice(sampling)) {
      const auto [id, logit] = *filtered++;
      token = id >= 0 && logit == -std::numeric_limits<float>::infinity() ? kNoTokenLeft : id;
    } else if (token >= 0 && sampling.NeedsWholeRow()) {
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
    token = sampler_.Sample(logits, sampling, sample_position_.host()[index]);
  } else {
    kernels::ArgmaxResult best;
    RETURN_IF_ERROR(kernels::GumbelArgmax({.logits = logits.data(),
                                           .temperature = &sampling.temperature,
                                           .seed = &sampling.seed,
                                           .position = sample_position_.host() + index,
                                           .out = &best,
                                           .logits_stride = config_.vocab_size,
                                           .num_rows = 1,
                                           .vocab_size = config_.vocab_size,
                                           .first_token_id = 0},
                                          host_));
    token = best.token_id;
  }
  if (token >= 0 && logits[token] == -std::numeric_limits<float>::infinity()) return kNoTokenLeft;
  return token;
}

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

}  // namespace weft
