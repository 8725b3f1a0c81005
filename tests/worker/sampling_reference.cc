#include "tests/worker/sampling_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/gumbel_argmax.h"

namespace weft {
namespace {

constexpr double kExcluded = -std::numeric_limits<double>::infinity();

std::vector<int> Counts(absl::Span<const std::int32_t> tokens, std::size_t vocab_size) {
  std::vector<int> counts(vocab_size);
  for (std::int32_t token : tokens) ++counts[token];
  return counts;
}

std::vector<double> Softmax(const std::vector<double>& logits) {
  const double highest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  double sum = 0;
  for (double logit : logits) sum += p.emplace_back(std::exp(logit - highest));
  for (double& value : p) value /= sum;
  return p;
}

// Ids by probability, the highest first, then by id.
std::vector<std::int32_t> Ranking(const std::vector<double>& values) {
  std::vector<std::int32_t> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](std::int32_t a, std::int32_t b) { return values[a] > values[b]; });
  return ids;
}

}  // namespace

SamplingReference::SamplingReference(const EngineRequest& request, absl::Span<const double> logits,
                                     absl::Span<const std::int32_t> output)
    : scores_(logits.begin(), logits.end()) {
  for (double p : Softmax(scores_)) logprobs_.push_back(std::log(p));
  if (request.logits != nullptr) Process(*request.logits, request.prompt_token_ids, output);
  const SamplingParams& sampling = request.sampling;
  if (sampling.temperature == 0) return;
  for (double& score : scores_) score /= sampling.temperature;
  Filter(sampling);
  const auto position = static_cast<std::int64_t>(request.prompt_token_ids.size() + output.size());
  for (std::size_t id = 0; id < scores_.size(); ++id) {
    scores_[id] += kernels::GumbelNoise(sampling.seed, position, static_cast<std::int32_t>(id));
  }
}

void SamplingReference::Process(const LogitsParams& params, absl::Span<const std::int32_t> prompt,
                                absl::Span<const std::int32_t> output) {
  const std::size_t vocab_size = scores_.size();
  if (!params.allowed_token_ids.empty()) {
    const std::vector<int> allowed = Counts(params.allowed_token_ids, vocab_size);
    for (std::size_t id = 0; id < vocab_size; ++id) {
      if (allowed[id] == 0) scores_[id] = kExcluded;
    }
  }
  for (const std::vector<std::int32_t>& word : params.bad_words) {
    std::vector<std::int32_t> text(output.begin(), output.end());
    text.push_back(word.back());
    if (text.size() >= word.size() && std::equal(word.rbegin(), word.rend(), text.rbegin())) {
      scores_[word.back()] = kExcluded;
    }
  }
  if (static_cast<int>(output.size()) < params.min_tokens) {
    for (std::int32_t id : params.ending_tokens) scores_[id] = kExcluded;
  }
  for (const auto& [id, bias] : params.logit_bias) scores_[id] += double{bias};
  const std::vector<int> in_prompt = Counts(prompt, vocab_size);
  const std::vector<int> in_output = Counts(output, vocab_size);
  for (std::size_t id = 0; id < vocab_size; ++id) {
    double& score = scores_[id];
    const double repetition = params.repetition_penalty;
    if (in_prompt[id] + in_output[id] > 0)
      score = score > 0 ? score / repetition : score * repetition;
    score -= in_output[id] * double{params.frequency_penalty};
    if (in_output[id] > 0) score -= double{params.presence_penalty};
  }
}

void SamplingReference::Filter(const SamplingParams& params) {
  std::vector<double> p = Softmax(scores_);
  const double highest = *std::max_element(p.begin(), p.end());
  for (std::size_t id = 0; id < p.size(); ++id) {
    if (p[id] < highest * double{params.min_p}) scores_[id] = kExcluded;
  }
  const std::vector<std::int32_t> ids = Ranking(scores_);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (params.top_k > 0 && i >= static_cast<std::size_t>(params.top_k))
      scores_[ids[i]] = kExcluded;
  }
  p = Softmax(scores_);
  double reached = 0;
  for (std::int32_t id : ids) {
    if (params.top_p < 1 && reached >= double{params.top_p}) scores_[id] = kExcluded;
    reached += p[id];
  }
}

std::int32_t SamplingReference::Token() const { return Ranking(scores_).front(); }

}  // namespace weft
