#include "router/text/added_tokens.h"

#include <utility>

#include "router/text/onig_syntax.h"
#include "router/text/utf8.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// The last character of `text`, the first one. Empty if `text` is.
std::string_view LastCharacter(std::string_view text) {
  std::size_t begin = text.size();
  while (begin > 0 && (static_cast<unsigned char>(text[--begin]) & 0xC0) == 0x80) {
  }
  return text.substr(begin);
}

std::string_view FirstCharacter(std::string_view text) {
  return text.empty() ? text : text.substr(0, ScanUtf8(text).num_bytes);
}

}  // namespace

absl::StatusOr<AddedTokenMatcher> AddedTokenMatcher::Create(std::vector<AddedToken> tokens) {
  // What Rust's regex calls \w: alphabetic (with the letters in circles), marks, digits,
  // connectors, joiners.
  ASSIGN_OR_RETURN(
      Pattern word,
      Pattern::Compile(R"([\p{L}\p{M}\p{Nl}\p{Nd}\p{Pc}\x{200C}\x{200D}\x{24B6}-\x{24E9})"
                       R"(\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189}])"));
  ASSIGN_OR_RETURN(Pattern space, Pattern::Compile("\\s"));
  return AddedTokenMatcher(std::move(tokens), std::move(word), std::move(space));
}

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens, Pattern word, Pattern space)
    : tokens_(std::move(tokens)),
      word_(std::move(word)),
      space_(std::move(space)),
      token_at_(1, -1) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    std::uint64_t node = 0;
    for (const char byte : tokens_[i].content) {
      const auto [child, is_new] =
          children_.try_emplace(node << 8 | static_cast<std::uint8_t>(byte), token_at_.size());
      if (is_new) token_at_.push_back(-1);
      node = child->second;
    }
    if (node == 0) continue;  // An empty token is nowhere.
    token_at_[node] = static_cast<std::int32_t>(i);
    starts_token_[static_cast<std::uint8_t>(tokens_[i].content[0])] = true;
  }
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::FindFrom(std::string_view text,
                                                                    std::size_t start) const {
  for (std::size_t begin = start; begin < text.size(); ++begin) {
    if (!starts_token_[static_cast<std::uint8_t>(text[begin])]) continue;
    std::int32_t longest = -1;
    std::uint64_t node = 0;
    for (std::size_t i = begin; i < text.size(); ++i) {
      const auto child = children_.find(node << 8 | static_cast<std::uint8_t>(text[i]));
      if (child == children_.end()) break;
      node = child->second;
      if (token_at_[node] >= 0) longest = token_at_[node];
    }
    if (longest >= 0) return Match{begin, &tokens_[longest]};
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<TextSegment>> AddedTokenMatcher::Split(std::string_view text) const {
  std::vector<TextSegment> segments;
  std::size_t done = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::optional<Match> match = FindFrom(text, start);
    if (!match) break;
    const AddedToken& token = *match->token;
    std::size_t begin = match->begin;
    std::size_t end = begin + token.content.size();
    start = end;  // Also where the token is discarded below.
    if (token.single_word) {
      ASSIGN_OR_RETURN(const bool single, IsSingleWord(text, begin, end));
      if (!single) continue;
    }
    // White space that the token before took along is not taken again.
    if (token.lstrip && begin < done) begin = done;
    while (token.lstrip && begin > done) {
      const std::string_view before = LastCharacter(text.substr(0, begin));
      ASSIGN_OR_RETURN(const bool is_space, IsOne(space_, before));
      if (!is_space) break;
      begin -= before.size();
    }
    while (token.rstrip && end < text.size()) {
      const std::string_view after = FirstCharacter(text.substr(end));
      ASSIGN_OR_RETURN(const bool is_space, IsOne(space_, after));
      if (!is_space) break;
      end += after.size();
    }
    if (begin >= end) continue;
    if (done < begin) segments.push_back({std::nullopt, text.substr(done, begin - done)});
    segments.push_back({token.id, {}});
    done = end;
  }
  if (done < text.size()) segments.push_back({std::nullopt, text.substr(done)});
  return segments;
}

absl::StatusOr<bool> AddedTokenMatcher::IsSingleWord(std::string_view text, std::size_t begin,
                                                     std::size_t end) const {
  ASSIGN_OR_RETURN(const bool before, IsOne(word_, LastCharacter(text.substr(0, begin))));
  ASSIGN_OR_RETURN(const bool after, IsOne(word_, FirstCharacter(text.substr(end))));
  return !before && !after;
}

absl::StatusOr<bool> AddedTokenMatcher::IsOne(const Pattern& pattern,
                                              std::string_view character) const {
  std::vector<TextRange> matches;
  RETURN_IF_ERROR(pattern.FindAll(character, matches));
  return !matches.empty();
}

}  // namespace weft
