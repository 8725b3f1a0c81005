#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "router/text/pattern.h"

namespace weft {

// What becomes of a match of the pattern; the names are Hugging Face's.
enum class SplitBehavior {
  kRemoved,
  kIsolated,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,  // as kIsolated, but matches next to each other stay together
};

struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior;
  bool invert = false;  // what lies between the matches counts as the matches
};

// Cuts text into the pieces that BPE then treats one by one: each step cuts the pieces of the one
// before it. The last step of Hugging Face's chain, ByteLevel, spells bytes as characters; here
// pieces stay bytes, so what is left of it is its cutting (a SplitStep with its own pattern) and
// its prefix.
struct PreTokenizer {
  std::vector<SplitStep> steps;
  // ByteLevel's add_prefix_space: before step `prefix_at`, pieces that do not start with a space
  // get one in front.
  bool add_prefix_space = false;
  std::size_t prefix_at = 0;

  // The pieces of `text`, none of them empty. They point into `text` or `storage`.
  absl::StatusOr<std::vector<std::string_view>> Split(std::string_view text,
                                                      std::deque<std::string>& storage) const;
};

// The pattern of GPT-2, which ByteLevel has built in.
absl::StatusOr<Pattern> CompileByteLevelPattern();

// Digits of any script and kind, as Rust's char::is_numeric() has them.
absl::StatusOr<Pattern> CompileDigitsPattern();

// `text` cut at `matches`, which are in order and do not overlap. Appends to `pieces`, none empty.
void SplitAtMatches(std::string_view text, const std::vector<TextRange>& matches,
                    SplitBehavior behavior, bool invert, std::vector<std::string_view>& pieces);

}  // namespace weft
