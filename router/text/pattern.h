#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft {

struct TextRange {
  std::size_t begin;  // in bytes
  std::size_t end;
};

// A regular expression in the dialect that Hugging Face's tokenizers uses (Oniguruma, Ruby syntax,
// Unicode 16), run by PCRE2. What the two read differently is rewritten or, when it cannot be,
// refused: a pattern that compiles finds the same matches as there.
//
// Threading: immutable; any thread.
class Pattern {
 public:
  // INVALID_ARGUMENT if `pattern` does not compile or uses what is refused.
  static absl::StatusOr<Pattern> Compile(std::string_view pattern);

  // Matches `text` itself.
  static absl::StatusOr<Pattern> CompileLiteral(std::string_view text);

  // Appends the matches in `text`, which must be valid UTF-8, from left to right. No match is empty
  // where the one before ended. RESOURCE_EXHAUSTED if the pattern backtracks without end.
  absl::Status FindAll(std::string_view text, std::vector<TextRange>& matches) const;

 private:
  struct Code;  // pcre2_code, freed by CodeDeleter
  struct CodeDeleter {
    void operator()(Code* code) const;
  };

  static absl::StatusOr<Pattern> CompileFor(std::string_view pattern, std::string_view shown,
                                            unsigned options);
  explicit Pattern(std::unique_ptr<Code, CodeDeleter> code) : code_(std::move(code)) {}

  std::unique_ptr<Code, CodeDeleter> code_;
};

}  // namespace weft
