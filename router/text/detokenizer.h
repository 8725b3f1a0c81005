#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "router/text/tokenizer.h"

namespace weft {

// Token ids of one stream to text, as they come. A delta never ends inside a UTF-8 character: the
// bytes of a started one wait for the next Append(). Bytes that cannot be UTF-8 become U+FFFD, one
// for each maximal part. However the ids are cut into calls, the deltas and Finish() together
// are what decoding all ids at once gives, which is what Hugging Face's decode() gives.
//
// Byte-level BPE needs no context: a prompt's ids are not to be appended.
//
// Threading: one thread at a time. `tokenizer` must outlive it.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens = true)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  // The text that `ids` complete; may be empty. Ids without a token (a model's padding) are
  // skipped, as Hugging Face does.
  std::string Append(absl::Span<const std::int32_t> ids);

  // The rest: U+FFFD if the last character was never completed, else nothing. Afterwards the
  // object is as new.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_tokens_;
  std::string pending_;  // The valid beginning of a character, at most 3 bytes.
};

// The text of `ids` at once.
std::string Detokenize(const Tokenizer& tokenizer, absl::Span<const std::int32_t> ids,
                       bool skip_special_tokens = true);

}  // namespace weft
