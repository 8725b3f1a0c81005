#include "worker/model/logits_processor.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace weft {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

}  // namespace

void LogitsProcessor::Clear() {
  params_ = nullptr;
  prompt_.clear();
  output_.clear();
  counts_.clear();
}

void LogitsProcessor::Start(std::shared_ptr<const LogitsParams> params,
                            absl::Span<const std::int32_t> token_ids,
                            std::int32_t num_prompt_tokens) {
  Clear();
  params_ = std::move(params);
  const auto prompt = token_ids.first(num_prompt_tokens);
  if (params_->prompt_logprobs.has_value()) prompt_.assign(prompt.begin(), prompt.end());
  if (params_->HasPenalties()) {
    for (std::int32_t id : prompt) counts_[id].in_prompt = true;
  }
  for (std::int32_t id : token_ids.subspan(num_prompt_tokens)) Append(id);
}

void LogitsProcessor::Append(std::int32_t token_id) {
  output_.push_back(token_id);
  if (params_->HasPenalties()) ++counts_[token_id].in_output;
}

void LogitsProcessor::Process(absl::Span<float> logits) {
  const LogitsParams& params = *params_;
  if (!params.allowed_token_ids.empty()) ApplyAllowed(logits);
  ApplyBadWords(logits);
  if (output_.size() < static_cast<std::size_t>(params.min_tokens)) {
    for (std::int32_t id : params.ending_tokens) logits[id] = kExcluded;
  }
  for (const auto& [id, bias] : params.logit_bias) logits[id] += bias;
  ApplyPenalties(logits);
}

void LogitsProcessor::ApplyAllowed(absl::Span<float> logits) {
  const std::vector<std::int32_t>& allowed = params_->allowed_token_ids;
  allowed_logits_.resize(allowed.size());
  for (std::size_t i = 0; i < allowed.size(); ++i) allowed_logits_[i] = logits[allowed[i]];
  std::fill(logits.begin(), logits.end(), kExcluded);
  for (std::size_t i = 0; i < allowed.size(); ++i) logits[allowed[i]] = allowed_logits_[i];
}

void LogitsProcessor::ApplyBadWords(absl::Span<float> logits) const {
  for (const std::vector<std::int32_t>& word : params_->bad_words) {
    const std::size_t prefix = word.size() - 1;
    if (prefix > output_.size()) continue;
    if (std::equal(word.begin(), word.end() - 1,
                   output_.end() - static_cast<std::ptrdiff_t>(prefix))) {
      logits[word.back()] = kExcluded;
    }
  }
}

void LogitsProcessor::ApplyPenalties(absl::Span<float> logits) const {
  const LogitsParams& params = *params_;
  for (const auto& [id, count] : counts_) {
    float& logit = logits[id];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    if (count.in_output == 0) continue;
    logit -= params.frequency_penalty * static_cast<float>(count.in_output);
    logit -= params.presence_penalty;
  }
}

PositionLogprobs LogprobsOf(absl::Span<const float> logits, double logsumexp, std::int32_t token_id,
                            std::int32_t num_top) {
  // Ties are settled by id.
  const auto before = [&](std::int32_t a, std::int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const auto logprob = [&](std::int32_t id) { return static_cast<float>(logits[id] - logsumexp); };

  // A heap of the best so far, the last of them on top.
  std::vector<std::int32_t> best;
  best.reserve(num_top);
  std::int32_t rank = 1;
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(logits.size()); ++id) {
    if (before(id, token_id)) ++rank;
    if (static_cast<std::int32_t>(best.size()) < num_top) {
      best.push_back(id);
      std::push_heap(best.begin(), best.end(), before);
    } else if (num_top > 0 && logits[id] > logits[best.front()]) {
      std::pop_heap(best.begin(), best.end(), before);
      best.back() = id;
      std::push_heap(best.begin(), best.end(), before);
    }
  }
  std::sort_heap(best.begin(), best.end(), before);

  PositionLogprobs result;
  result.token = {.token_id = token_id, .logprob = logprob(token_id), .rank = rank};
  result.top.reserve(best.size());
  for (std::size_t i = 0; i < best.size(); ++i) {
    result.top.push_back({.token_id = best[i],
                          .logprob = logprob(best[i]),
                          .rank = static_cast<std::int32_t>(i) + 1});
  }
  return result;
}

}  // namespace weft
