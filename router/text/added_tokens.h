#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "router/text/pattern.h"

namespace weft {

// A token that is looked for in the text before anything else happens to it.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;  // not inside or next to a word
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and that after it
  bool normalized = false;   // looked for in the normalized text
  bool special = false;
};

// An added token, or the text between two of them.
struct TextSegment {
  std::optional<std::int32_t> id;
  std::string_view text;  // empty for a token
};

// Finds added tokens: the leftmost first, of those the longest.
//
// Threading: immutable; any thread.
class AddedTokenMatcher {
 public:
  // INVALID_ARGUMENT if a pattern it needs does not compile.
  static absl::StatusOr<AddedTokenMatcher> Create(std::vector<AddedToken> tokens);

  // `text`, valid UTF-8, as segments in order. As in Hugging Face, a token that starts in white
  // space which the one before took along is found all the same. RESOURCE_EXHAUSTED as
  // Pattern::FindAll().
  absl::StatusOr<std::vector<TextSegment>> Split(std::string_view text) const;

 private:
  struct Match {
    std::size_t begin;
    const AddedToken* token;
  };

  AddedTokenMatcher(std::vector<AddedToken> tokens, Pattern word, Pattern space);
  std::optional<Match> FindFrom(std::string_view text, std::size_t start) const;
  absl::StatusOr<bool> IsSingleWord(std::string_view text, std::size_t begin,
                                    std::size_t end) const;
  absl::StatusOr<bool> IsOne(const Pattern& pattern, std::string_view character) const;

  std::vector<AddedToken> tokens_;
  Pattern word_;   // one character of a word
  Pattern space_;  // one character of white space
  // A trie over bytes; node 0 is the root.
  absl::flat_hash_map<std::uint64_t, std::uint32_t> children_;  // by node << 8 | byte
  std::vector<std::int32_t> token_at_;                          // by node: index in tokens_, or -1
  std::array<bool, 256> starts_token_{};
};

}  // namespace weft
