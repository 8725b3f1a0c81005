#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"

namespace weft {

// What placement knows of one group at one moment.
struct GroupLoad {
  bool ready = false;
  std::int64_t max_prompt_tokens = 0;  // its max_model_len - 1: one token has to fit behind
  std::int64_t requests = 0;           // running and waiting there, this router's newest included
  std::int64_t free_blocks = 0;        // of its KV cache, when it last said
};

// The ready group that fits a prompt of `prompt_tokens` and has the fewest requests now; between
// equals, the one with more free blocks, then the first. Nothing when no ready group fits.
std::optional<std::size_t> PickGroup(absl::Span<const GroupLoad> groups,
                                     std::int64_t prompt_tokens);

}  // namespace weft
