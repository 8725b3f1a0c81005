#define PCRE2_CODE_UNIT_WIDTH 8
#include "router/text/pattern.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "router/text/onig_syntax.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

template <auto Free>
struct Freer {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

std::size_t CharacterBytes(std::string_view text, std::size_t offset) {
  std::size_t end = offset + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
  return end - offset;
}

}  // namespace

void Pattern::CodeDeleter::operator()(Code* code) const {
  pcre2_code_free(reinterpret_cast<pcre2_code*>(code));
}

absl::StatusOr<Pattern> Pattern::Compile(std::string_view pattern) {
  absl::StatusOr<std::string> rewritten = OnigToPcre2(pattern);
  if (!rewritten.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("pattern \"{}\": {}", pattern,
                    std::string_view(rewritten.status().message().data(),
                                     rewritten.status().message().size())));
  }
  return CompileFor(*rewritten, pattern, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE);
}

absl::StatusOr<Pattern> Pattern::CompileLiteral(std::string_view text) {
  return CompileFor(text, text, PCRE2_UTF | PCRE2_LITERAL);
}

absl::StatusOr<Pattern> Pattern::CompileFor(std::string_view pattern, std::string_view shown,
                                            unsigned options) {
  const std::unique_ptr<pcre2_compile_context, Freer<pcre2_compile_context_free>> context(
      pcre2_compile_context_create(nullptr));
  CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options, &error, &offset, context.get());
  if (code == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("pattern \"{}\" does not compile: {}", shown, ErrorText(error)));
  }
  // Without JIT (an unsupported machine) matching is slower and otherwise the same.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return Pattern(std::unique_ptr<Code, CodeDeleter>(reinterpret_cast<Code*>(code)));
}

absl::Status Pattern::FindAll(std::string_view text, std::vector<TextRange>& matches) const {
  const auto* code = reinterpret_cast<const pcre2_code*>(code_.get());
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data_free>> data(
      pcre2_match_data_create(1, nullptr));
  CHECK(data != nullptr);
  // A run of one kind of character is given up character by character, so the limit must grow with
  // the text; a pattern that backtracks over its own backtracking meets it all the same.
  const std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context_free>> context(
      pcre2_match_context_create(nullptr));
  CHECK(context != nullptr);
  pcre2_set_match_limit(context.get(), static_cast<std::uint32_t>(std::min<std::size_t>(
                                           1'000'000 + 16 * text.size(), UINT32_MAX)));
  std::size_t start = 0;
  std::optional<std::size_t> last_end;
  while (start <= text.size()) {
    int rc = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK, data.get(),
                         context.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {  // The interpreter keeps its stack on the heap.
      rc = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       data.get(), context.get());
    }
    if (rc == PCRE2_ERROR_NOMATCH) return absl::OkStatus();
    if (rc < 0) {
      return absl::ResourceExhaustedError(
          fmt::format("a pattern of the tokenizer gave up at byte {}: {}", start, ErrorText(rc)));
    }
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data.get());
    const TextRange match{offsets[0], offsets[1]};
    start = match.end;
    if (match.begin == match.end && last_end == match.end) {
      start += start < text.size() ? CharacterBytes(text, start) : 1;
      continue;
    }
    last_end = match.end;
    matches.push_back(match);
  }
  return absl::OkStatus();
}

}  // namespace weft
