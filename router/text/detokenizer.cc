#include "router/text/detokenizer.h"

#include <optional>
#include <utility>

#include "router/text/utf8.h"

namespace weft {
namespace {

constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace

std::string Detokenizer::Append(absl::Span<const std::int32_t> ids) {
  std::string bytes = std::exchange(pending_, {});
  for (const std::int32_t id : ids) {
    if (skip_special_tokens_ && tokenizer_.IsSpecial(id)) continue;
    if (const std::optional<std::string_view> token = tokenizer_.TokenBytes(id)) bytes += *token;
  }
  std::string text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const Utf8Part part = ScanUtf8(rest);
    if (part.kind == Utf8Kind::kIncomplete) {
      pending_ = rest;
      break;
    }
    text +=
        part.kind == Utf8Kind::kCharacter ? rest.substr(0, part.num_bytes) : kReplacementCharacter;
    rest.remove_prefix(part.num_bytes);
  }
  return text;
}

std::string Detokenizer::Finish() {
  return std::exchange(pending_, {}).empty() ? std::string() : std::string(kReplacementCharacter);
}

std::string Detokenize(const Tokenizer& tokenizer, absl::Span<const std::int32_t> ids,
                       bool skip_special_tokens) {
  Detokenizer detokenizer(tokenizer, skip_special_tokens);
  std::string text = detokenizer.Append(ids);
  return text += detokenizer.Finish();
}

}  // namespace weft
