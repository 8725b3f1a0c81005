#include "worker/engine/sequence.h"

#include <algorithm>
#include <utility>

namespace weft {
namespace {

bool Contains(const std::vector<std::int32_t>& sorted_ids, std::int32_t id) {
  return std::binary_search(sorted_ids.begin(), sorted_ids.end(), id);
}

}  // namespace

Sequence::Sequence(EngineRequest request, std::uint64_t arrival, std::int64_t max_model_len)
    : id(request.id),
      key{.priority = request.priority, .arrival = arrival},
      token_ids(std::move(request.prompt_token_ids)),
      num_prompt_tokens(token_ids.size()),
      max_length(std::min(static_cast<std::int64_t>(num_prompt_tokens) + request.max_tokens,
                          max_model_len)),
      stop_token_ids(std::move(request.stop_token_ids)),
      sampling(request.sampling),
      logits(std::move(request.logits)),
      deadline(request.deadline),
      hash_chain(std::move(request.hash_chain)) {
  if (!request.ignore_eos) eos_token_ids = std::move(request.eos_token_ids);
  std::sort(stop_token_ids.begin(), stop_token_ids.end());
  std::sort(eos_token_ids.begin(), eos_token_ids.end());
  sampling.whole_row =
      logits != nullptr && (logits->ChangesLogits() || logits->logprobs.has_value());
  if (logits != nullptr && logits->prompt_logprobs.has_value()) {
    score_end = static_cast<std::int64_t>(num_prompt_tokens) - 1;
  }
}

FinishReason Sequence::Append(std::int32_t token_id) {
  token_ids.push_back(token_id);
  const std::size_t num_output = token_ids.size() - num_prompt_tokens;
  if (logits == nullptr || num_output > static_cast<std::size_t>(logits->min_tokens)) {
    if (Contains(eos_token_ids, token_id)) return FinishReason::kEos;
    if (Contains(stop_token_ids, token_id)) return FinishReason::kStopToken;
  }
  if (static_cast<std::int64_t>(token_ids.size()) >= max_length) return FinishReason::kLength;
  return FinishReason::kNone;
}

std::int32_t Sequence::NumScored(std::int32_t num_rows) const {
  const std::int64_t begin = std::max(num_computed, scored);
  const std::int64_t end = std::min(num_computed + num_rows, score_end);
  return static_cast<std::int32_t>(std::max<std::int64_t>(0, end - begin));
}

}  // namespace weft
