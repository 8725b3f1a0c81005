#include "router/text/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "server/base/check.h"

namespace weft {
namespace {

std::uint32_t Step(const std::string& text, const std::vector<std::uint32_t>& fallback,
                   std::uint32_t matched, char byte) {
  if (matched == text.size()) matched = fallback[matched];
  while (matched > 0 && text[matched] != byte) matched = fallback[matched];
  return matched + (text[matched] == byte ? 1 : 0);
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (std::string& text : stops) {
    CHECK(!text.empty());
    std::vector<std::uint32_t> fallback(text.size() + 1, 0);
    for (std::size_t i = 1; i < text.size(); ++i) {
      fallback[i + 1] = Step(text, fallback, fallback[i], text[i]);
    }
    stops_.push_back({.text = std::move(text), .fallback = std::move(fallback)});
  }
}

std::optional<StopMatcher::Match> StopMatcher::Read(std::string_view piece, bool may_stop) {
  for (std::size_t i = 0; i < piece.size(); ++i) {
    const Stop* complete = nullptr;
    for (Stop& stop : stops_) {
      stop.matched = Step(stop.text, stop.fallback, stop.matched, piece[i]);
      if (stop.matched < stop.text.size()) continue;
      if (complete == nullptr || stop.text.size() > complete->text.size()) complete = &stop;
    }
    if (may_stop && complete != nullptr) return Match{.stop = &complete->text, .end = i + 1};
  }
  return std::nullopt;
}

std::size_t StopMatcher::pending_bytes() const {
  std::uint32_t longest = 0;
  for (const Stop& stop : stops_) {
    // A whole one was ignored; what it can still begin is its fallback.
    const bool whole = stop.matched == stop.text.size();
    longest = std::max(longest, whole ? stop.fallback[stop.matched] : stop.matched);
  }
  return longest;
}

}  // namespace weft
