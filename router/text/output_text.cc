#include "router/text/output_text.h"

#include <optional>
#include <utility>

namespace weft {

OutputText::OutputText(const Tokenizer& tokenizer, OutputTextOptions options)
    : options_(std::move(options)),
      detokenizer_(tokenizer, options_.skip_special_tokens),
      matcher_(options_.stop) {}

const std::string* OutputText::Append(std::int32_t id, std::string& text) {
  ++num_tokens_;
  const std::string piece = detokenizer_.Append({&id, 1});
  const auto match = matcher_.Read(piece, /*may_stop=*/num_tokens_ > options_.min_tokens);
  if (options_.include_stop_str_in_output) {  // all of it goes out in any case
    text.append(piece, 0, match ? match->end : piece.size());
    return match ? match->stop : nullptr;
  }
  held_ += piece;
  if (match) {
    const std::size_t end = held_.size() - piece.size() + match->end;
    text.append(held_, 0, end - match->stop->size());
    held_.clear();
    return match->stop;
  }
  const std::size_t free = held_.size() - matcher_.pending_bytes();
  text.append(held_, 0, free);
  held_.erase(0, free);
  return nullptr;
}

void OutputText::Flush(std::string& text) {
  text += std::exchange(held_, {});
  text += detokenizer_.Finish();
}

}  // namespace weft
