#include "router/policy.h"

namespace weft {
namespace {

bool LighterThan(const GroupLoad& a, const GroupLoad& b) {
  if (a.requests != b.requests) return a.requests < b.requests;
  return a.free_blocks > b.free_blocks;
}

}  // namespace

std::optional<std::size_t> PickGroup(absl::Span<const GroupLoad> groups,
                                     std::int64_t prompt_tokens) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i].ready || groups[i].max_prompt_tokens < prompt_tokens) continue;
    if (!best || LighterThan(groups[i], groups[*best])) best = i;
  }
  return best;
}

}  // namespace weft
