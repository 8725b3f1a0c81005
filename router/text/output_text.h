#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "router/text/detokenizer.h"
#include "router/text/stop_matcher.h"
#include "router/text/tokenizer.h"

namespace weft {

struct OutputTextOptions {
  std::vector<std::string> stop;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  std::int64_t min_tokens = 0;  // a stop string counts behind so many tokens only
};

// The text of one sample, token by token, up to the first stop string. What may turn out to be the
// beginning of one, or is an incomplete character, waits for the next token.
//
// Which text has come out after a token depends on the tokens so far only, not on how they were
// cut into messages: a request that is resumed elsewhere goes on where its text ended.
//
// One thread at a time. `tokenizer` must outlive it.
class OutputText {
 public:
  OutputText(const Tokenizer& tokenizer, OutputTextOptions options);

  // Reads the next token and appends the text it releases to `text`. Returns the stop string that
  // it completes, else null; then nothing is to follow.
  const std::string* Append(std::int32_t id, std::string& text);

  // Counts a token that has no text: the stop token that ended the sample.
  void SkipToken() { ++num_tokens_; }

  // Appends what still waits: nothing more comes.
  void Flush(std::string& text);

 private:
  const OutputTextOptions options_;
  Detokenizer detokenizer_;
  StopMatcher matcher_;
  std::int64_t num_tokens_ = 0;
  std::string held_;  // of a stop string's beginning, perhaps
};

}  // namespace weft
