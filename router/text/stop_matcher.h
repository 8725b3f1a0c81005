#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// Finds the first stop string in a text that comes in pieces. The match that ends first wins, and
// of those that end together the longest: the answer does not depend on how the text is cut.
//
// Costs one step per byte and stop string, however the strings overlap. One thread at a time.
class StopMatcher {
 public:
  // No string is empty.
  explicit StopMatcher(std::vector<std::string> stops);

  struct Match {
    const std::string* stop;  // lives as long as the matcher
    std::size_t end;          // the stop string's last byte is piece[end - 1]
  };

  // Reads `piece` up to the first end of a stop string. With `may_stop` false all is read, and
  // stop strings that end in it do not count; those that only begin in it do, later.
  std::optional<Match> Read(std::string_view piece, bool may_stop);

  // Of what was read, the bytes at the end that may be the beginning of a stop string.
  std::size_t pending_bytes() const;

 private:
  // Knuth, Morris and Pratt: after a mismatch behind `matched` bytes, fallback[matched] of them
  // still match.
  struct Stop {
    std::string text;
    std::vector<std::uint32_t> fallback;
    std::uint32_t matched = 0;
  };

  std::vector<Stop> stops_;
};

}  // namespace weft
