#include "router/text/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"

namespace weft {
namespace {

struct Part {
  TextRange range;
  bool is_match;
};

// All of `text`, as matches and what lies between them.
std::vector<Part> CoverText(std::string_view text, const std::vector<TextRange>& matches,
                            bool invert) {
  std::vector<Part> parts;
  std::size_t end = 0;
  for (const TextRange& match : matches) {
    if (end != match.begin) parts.push_back({{end, match.begin}, invert});
    parts.push_back({match, !invert});
    end = match.end;
  }
  if (end != text.size()) parts.push_back({{end, text.size()}, invert});
  return parts;
}

// Joins each match to the part that was before it in `parts`, unless that is a match as well.
std::vector<TextRange> MergeMatches(const std::vector<Part>& parts) {
  std::vector<TextRange> merged;
  bool previous_is_match = false;
  for (const Part& part : parts) {
    if (part.is_match && !previous_is_match && !merged.empty()) {
      merged.back() = {std::min(merged.back().begin, part.range.begin),
                       std::max(merged.back().end, part.range.end)};
    } else {
      merged.push_back(part.range);
    }
    previous_is_match = part.is_match;
  }
  return merged;
}

std::vector<TextRange> MergeAlike(const std::vector<Part>& parts) {
  std::vector<TextRange> merged;
  bool previous_is_match = false;
  for (const Part& part : parts) {
    if (part.is_match == previous_is_match && !merged.empty()) {
      merged.back().end = part.range.end;
    } else {
      merged.push_back(part.range);
    }
    previous_is_match = part.is_match;
  }
  return merged;
}

std::vector<TextRange> Arrange(std::vector<Part> parts, SplitBehavior behavior) {
  std::vector<TextRange> ranges;
  switch (behavior) {
    case SplitBehavior::kRemoved:
    case SplitBehavior::kIsolated:
      for (const Part& part : parts) {
        if (behavior == SplitBehavior::kIsolated || !part.is_match) ranges.push_back(part.range);
      }
      break;
    case SplitBehavior::kMergedWithPrevious:
      ranges = MergeMatches(parts);
      break;
    case SplitBehavior::kMergedWithNext:
      std::reverse(parts.begin(), parts.end());
      ranges = MergeMatches(parts);
      std::reverse(ranges.begin(), ranges.end());
      break;
    case SplitBehavior::kContiguous:
      ranges = MergeAlike(parts);
      break;
  }
  return ranges;
}

}  // namespace

void SplitAtMatches(std::string_view text, const std::vector<TextRange>& matches,
                    SplitBehavior behavior, bool invert, std::vector<std::string_view>& pieces) {
  for (const TextRange& range : Arrange(CoverText(text, matches, invert), behavior)) {
    if (range.begin != range.end) {
      pieces.push_back(text.substr(range.begin, range.end - range.begin));
    }
  }
}

absl::StatusOr<std::vector<std::string_view>> PreTokenizer::Split(
    std::string_view text, std::deque<std::string>& storage) const {
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  std::vector<std::string_view> next;
  std::vector<TextRange> matches;
  for (std::size_t i = 0; i <= steps.size(); ++i) {
    if (add_prefix_space && i == prefix_at) {
      for (std::string_view& piece : pieces) {
        if (!piece.starts_with(' ')) piece = storage.emplace_back(" " + std::string(piece));
      }
    }
    if (i == steps.size()) break;
    next.clear();
    for (const std::string_view piece : pieces) {
      matches.clear();
      RETURN_IF_ERROR(steps[i].pattern.FindAll(piece, matches));
      SplitAtMatches(piece, matches, steps[i].behavior, steps[i].invert, next);
    }
    pieces.swap(next);
  }
  return pieces;
}

absl::StatusOr<Pattern> CompileByteLevelPattern() {
  return Pattern::Compile(
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
}

absl::StatusOr<Pattern> CompileDigitsPattern() {
  // Rust's tables are those of Unicode 17, which added the two ranges.
  return Pattern::Compile(R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])");
}

}  // namespace weft
