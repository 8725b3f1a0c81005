#include "router/text/bad_words.h"

#include <fmt/format.h>

#include <utility>

#include "absl/status/status.h"
#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<std::vector<std::vector<std::int32_t>>> BadWordTokens(const Tokenizer& tokenizer,
                                                                     const std::string& word) {
  const std::size_t begin = word.find_first_not_of(" \t\n\v\f\r");
  const std::string stem = begin == std::string::npos ? "" : word.substr(begin);
  ASSIGN_OR_RETURN(std::vector<std::int32_t> at_start, tokenizer.Encode(stem, false));
  if (at_start.empty()) {
    return absl::InvalidArgumentError(fmt::format("the bad word \"{}\" has no token", word));
  }
  ASSIGN_OR_RETURN(std::vector<std::int32_t> behind_space, tokenizer.Encode(" " + stem, false));
  std::vector<std::vector<std::int32_t>> sequences = {std::move(at_start)};
  if (behind_space.size() == sequences[0].size() && behind_space[0] != sequences[0][0]) {
    sequences.push_back(std::move(behind_space));
  }
  return sequences;
}

}  // namespace weft
