#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace weft {

// What placement knows of one group at one moment.
struct GroupLoad {
  bool ready = false;
  std::int64_t max_prompt_tokens = 0;  // its max_model_len - 1: one token has to fit behind
  std::int64_t requests = 0;           // running and waiting there, this router's newest included
  std::int64_t free_blocks = 0;        // of its KV cache, when it last said
  std::int64_t cached_tokens = 0;      // of the prompt, in its prefix cache
  std::int64_t prefill_tokens = 0;     // of prompts of this router, still to be computed there
  double weight = 1;                   // share of requests beside other groups'; above 0
};

enum class RoutingPolicy { kPrefixAware, kLeastLoaded, kRoundRobin, kRandom };
inline constexpr std::pair<RoutingPolicy, std::string_view> kRoutingPolicyNames[] = {
    {RoutingPolicy::kPrefixAware, "prefix-aware"},
    {RoutingPolicy::kLeastLoaded, "least-loaded"},
    {RoutingPolicy::kRoundRobin, "round-robin"},
    {RoutingPolicy::kRandom, "random"}};
std::optional<RoutingPolicy> ParseRoutingPolicy(std::string_view name);
// "prefix-aware, least-loaded, ..."
inline constexpr std::string_view kRoutingPolicies =
    "prefix-aware, least-loaded, round-robin or random";

// Chooses groups. Pure but for what it remembers: its turn, its random numbers. One thread at a
// time.
//
// prefix-aware  the least work before the first token, in tokens: what of the prompt is not cached
//               there, and what that group has still to compute of others; a request that runs or
//               waits there counts for `request_tokens`. So a cached prefix of n tokens is worth a
//               queue longer by n tokens, and no more.
// least-loaded  the fewest requests.
// round-robin   the next that is ready and fits.
// random        any that is ready and fits.
//
// A group of half the weight of the others has half their share: what it has counts twice, its turn
// comes half as often.
//
// Between equals, the first two take the group with fewer requests, with more free blocks, then the
// first.
class Policy {
 public:
  explicit Policy(RoutingPolicy policy, std::int64_t request_tokens = 128, std::uint32_t seed = 0)
      : policy_(policy), request_tokens_(request_tokens), random_(seed) {}

  // A ready group that fits a prompt of `prompt_tokens`, or nothing.
  std::optional<std::size_t> Pick(absl::Span<const GroupLoad> groups, std::int64_t prompt_tokens);

 private:
  // The smaller, the better.
  double Cost(const GroupLoad& group, std::int64_t prompt_tokens) const;
  std::optional<std::size_t> PickInTurn(absl::Span<const GroupLoad> groups,
                                        std::int64_t prompt_tokens);
  bool Better(const GroupLoad& a, const GroupLoad& b, std::int64_t prompt_tokens) const;

  const RoutingPolicy policy_;
  const std::int64_t request_tokens_;
  // Round-robin: the group to try first, and what each has saved of turns with a low weight.
  std::size_t turn_ = 0;
  std::vector<double> credit_;
  std::mt19937 random_;
};

}  // namespace weft
