#include "router/policy.h"

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

std::int64_t Policy::Cost(const GroupLoad& group, std::int64_t prompt_tokens) const {
  if (policy_ != RoutingPolicy::kPrefixAware) return group.requests;
  return prompt_tokens - group.cached_tokens + group.prefill_tokens +
         request_tokens_ * group.requests;
}

bool Policy::Better(const GroupLoad& a, const GroupLoad& b, std::int64_t prompt_tokens) const {
  const auto rank = [&](const GroupLoad& group) {
    return std::tuple(Cost(group, prompt_tokens), group.requests, -group.free_blocks);
  };
  return rank(a) < rank(b);
}

std::optional<std::size_t> Policy::Pick(absl::Span<const GroupLoad> groups,
                                        std::int64_t prompt_tokens) {
  std::optional<std::size_t> best;
  std::uint32_t fitting = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    // Round-robin looks at all of them from its turn on.
    const std::size_t at = policy_ == RoutingPolicy::kRoundRobin ? (turn_ + i) % groups.size() : i;
    if (!Fits(groups[at], prompt_tokens)) continue;
    ++fitting;
    switch (policy_) {
      case RoutingPolicy::kRoundRobin:
        turn_ = at + 1;
        return at;
      case RoutingPolicy::kRandom:  // each of the n seen so far stays with probability 1 / n
        if (std::uniform_int_distribution<std::uint32_t>(1, fitting)(random_) == 1) best = at;
        break;
      case RoutingPolicy::kPrefixAware:
      case RoutingPolicy::kLeastLoaded:
        if (!best || Better(groups[at], groups[*best], prompt_tokens)) best = at;
        break;
    }
  }
  return best;
}

}  // namespace weft
