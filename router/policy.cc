#include "router/policy.h"

#include <algorithm>
#include <tuple>

namespace weft {
namespace {

bool Fits(const GroupLoad& group, std::int64_t prompt_tokens) {
  return group.ready && group.max_prompt_tokens >= prompt_tokens;
}

}  // namespace

std::optional<RoutingPolicy> ParseRoutingPolicy(std::string_view name) {
  for (const auto& [policy, known] : kRoutingPolicyNames) {
    if (name == known) return policy;
  }
  return std::nullopt;
}

double Policy::Cost(const GroupLoad& group, std::int64_t prompt_tokens) const {
  if (group.weight < 1) {
    // With the request: one without any has no share otherwise.
    GroupLoad whole = group;
    whole.weight = 1;
    ++whole.requests;
    return Cost(whole, prompt_tokens) / group.weight;
  }
  if (policy_ != RoutingPolicy::kPrefixAware) return static_cast<double>(group.requests);
  return static_cast<double>(prompt_tokens - group.cached_tokens + group.prefill_tokens +
                             request_tokens_ * group.requests);
}

bool Policy::Better(const GroupLoad& a, const GroupLoad& b, std::int64_t prompt_tokens) const {
  const auto rank = [&](const GroupLoad& group) {
    return std::tuple(Cost(group, prompt_tokens), group.requests, -group.free_blocks);
  };
  return rank(a) < rank(b);
}

std::optional<std::size_t> Policy::PickInTurn(absl::Span<const GroupLoad> groups,
                                              std::int64_t prompt_tokens) {
  double most = 0;
  for (const GroupLoad& group : groups) {
    if (Fits(group, prompt_tokens)) most = std::max(most, group.weight);
  }
  if (most == 0) return std::nullopt;
  credit_.resize(groups.size(), 0);
  while (true) {  // at most twice: one has the greatest weight
    const std::size_t at = turn_++ % groups.size();
    if (!Fits(groups[at], prompt_tokens)) continue;
    credit_[at] += groups[at].weight / most;
    if (credit_[at] < 1) continue;
    credit_[at] -= 1;
    return at;
  }
}

std::optional<std::size_t> Policy::Pick(absl::Span<const GroupLoad> groups,
                                        std::int64_t prompt_tokens) {
  if (policy_ == RoutingPolicy::kRoundRobin) return PickInTurn(groups, prompt_tokens);
  std::optional<std::size_t> best;
  double weights = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!Fits(groups[i], prompt_tokens)) continue;
    weights += groups[i].weight;
    if (policy_ == RoutingPolicy::kRandom) {
      // Each of those seen so far stays with a probability like its weight.
      if (std::uniform_real_distribution<double>(0, weights)(random_) < groups[i].weight) best = i;
    } else if (!best || Better(groups[i], groups[*best], prompt_tokens)) {
      best = i;
    }
  }
  return best;
}

}  // namespace weft
