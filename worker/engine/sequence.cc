#include "worker/engine/sequence.h"

#include <algorithm>
#include <utility>

namespace weft {
namespace {

bool Contains(const std::vector<std::int32_t>& ids, std::int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
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
      deadline(request.deadline) {
  if (!request.ignore_eos) eos_token_ids = std::move(request.eos_token_ids);
}

FinishReason Sequence::Append(std::int32_t token_id) {
  token_ids.push_back(token_id);
  if (Contains(eos_token_ids, token_id)) return FinishReason::kEos;
  if (Contains(stop_token_ids, token_id)) return FinishReason::kStopToken;
  if (static_cast<std::int64_t>(token_ids.size()) >= max_length) return FinishReason::kLength;
  return FinishReason::kNone;
}

}  // namespace weft
