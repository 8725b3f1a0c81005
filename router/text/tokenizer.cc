#include "router/text/tokenizer.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <utility>

#include "absl/status/status.h"
#include "router/text/byte_level.h"
#include "router/text/tokenizer_json.h"
#include "router/text/utf8.h"
#include "server/base/read_file.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{256} << 20;

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

absl::StatusOr<std::string> NormalizeNfc(std::string_view text) {
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t num_bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &result,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (num_bytes < 0) {
    return absl::ResourceExhaustedError(
        fmt::format("cannot normalize the text: {}", utf8proc_errmsg(num_bytes)));
  }
  std::string normalized(reinterpret_cast<const char*>(result), num_bytes);
  std::free(result);
  return normalized;
}

// What an id decodes to.
struct Token {
  std::string bytes;
  bool exists = false;
  bool special = false;
};

std::string DecodedBytes(const std::string& spelling) {
  return ByteLevelBytes(spelling).value_or(spelling);
}

std::vector<Token> MakeTokenTable(const TokenizerSpec& spec) {
  std::int32_t num_ids = 0;
  for (const auto& [_, id] : spec.vocabulary) num_ids = std::max(num_ids, id + 1);
  for (const AddedToken& token : spec.added_tokens) num_ids = std::max(num_ids, token.id + 1);
  std::vector<Token> table(num_ids);
  for (const auto& [spelling, id] : spec.vocabulary) {
    table[id] = {.bytes = DecodedBytes(spelling), .exists = true};
  }
  for (const AddedToken& token : spec.added_tokens) {
    table[token.id] = {
        .bytes = DecodedBytes(token.content), .exists = true, .special = token.special};
  }
  return table;
}

}  // namespace

struct Tokenizer::Impl {
  static absl::StatusOr<std::unique_ptr<const Impl>> Create(TokenizerSpec spec);

  absl::StatusOr<std::string> Normalize(std::string_view text) const {
    if (!normalize_nfc || IsAscii(text)) return std::string(text);
    return NormalizeNfc(text);
  }

  // Appends the ids of text without unnormalized added tokens.
  absl::Status EncodeUnnormalized(std::string_view text, Bpe::Scratch& scratch,
                                  std::vector<std::int32_t>& ids) const {
    ASSIGN_OR_RETURN(const std::string normalized, Normalize(text));
    ASSIGN_OR_RETURN(const std::vector<TextSegment> segments, normalized_matcher.Split(normalized));
    for (const TextSegment& segment : segments) {
      if (segment.id) {
        ids.push_back(*segment.id);
        continue;
      }
      std::deque<std::string> storage;
      ASSIGN_OR_RETURN(const std::vector<std::string_view> pieces,
                       pre_tokenizer.Split(segment.text, storage));
      for (const std::string_view piece : pieces) bpe.Encode(piece, scratch, ids);
    }
    return absl::OkStatus();
  }

  Bpe bpe;
  PreTokenizer pre_tokenizer;
  AddedTokenMatcher raw_matcher;         // added tokens to find before normalization
  AddedTokenMatcher normalized_matcher;  // and after it
  bool normalize_nfc;
  std::vector<std::int32_t> prefix;
  std::vector<std::int32_t> suffix;
  std::vector<Token> tokens;  // by id
};

absl::StatusOr<std::unique_ptr<const Tokenizer::Impl>> Tokenizer::Impl::Create(TokenizerSpec spec) {
  std::vector<AddedToken> raw;
  std::vector<AddedToken> normalized;
  for (AddedToken& token : spec.added_tokens) {
    if (token.normalized && spec.normalize_nfc) {
      ASSIGN_OR_RETURN(token.content, NormalizeNfc(token.content));
    }
    (token.normalized ? normalized : raw).push_back(token);
  }
  ASSIGN_OR_RETURN(AddedTokenMatcher raw_matcher, AddedTokenMatcher::Create(std::move(raw)));
  ASSIGN_OR_RETURN(AddedTokenMatcher normalized_matcher,
                   AddedTokenMatcher::Create(std::move(normalized)));
  std::vector<Token> tokens = MakeTokenTable(spec);
  return std::unique_ptr<const Impl>(new Impl{.bpe = Bpe(spec.bpe),
                                              .pre_tokenizer = std::move(spec.pre_tokenizer),
                                              .raw_matcher = std::move(raw_matcher),
                                              .normalized_matcher = std::move(normalized_matcher),
                                              .normalize_nfc = spec.normalize_nfc,
                                              .prefix = std::move(spec.prefix),
                                              .suffix = std::move(spec.suffix),
                                              .tokens = std::move(tokens)});
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string json, ReadFile(path, kMaxFileBytes));
  return Parse(json, path);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view json,
                                                            std::string_view name) {
  ASSIGN_OR_RETURN(TokenizerSpec spec, ParseTokenizerJson(json, name));
  ASSIGN_OR_RETURN(std::unique_ptr<const Impl> impl, Impl::Create(std::move(spec)));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

absl::StatusOr<std::vector<std::int32_t>> Tokenizer::Encode(std::string_view text,
                                                            bool add_special_tokens) const {
  if (static_cast<std::int64_t>(text.size()) > kMaxTextBytes) {
    return absl::ResourceExhaustedError(
        fmt::format("the text has {} bytes; at most {} are allowed", text.size(), kMaxTextBytes));
  }
  if (const std::optional<std::size_t> invalid = FindInvalidUtf8(text)) {
    return absl::InvalidArgumentError(fmt::format("the text is not UTF-8 at byte {}", *invalid));
  }
  std::vector<std::int32_t> ids;
  if (add_special_tokens) ids = impl_->prefix;
  ASSIGN_OR_RETURN(const std::vector<TextSegment> segments, impl_->raw_matcher.Split(text));
  Bpe::Scratch scratch;
  for (const TextSegment& segment : segments) {
    if (segment.id) {
      ids.push_back(*segment.id);
    } else {
      RETURN_IF_ERROR(impl_->EncodeUnnormalized(segment.text, scratch, ids));
    }
  }
  if (add_special_tokens) ids.insert(ids.end(), impl_->suffix.begin(), impl_->suffix.end());
  return ids;
}

std::int32_t Tokenizer::vocab_size() const {
  return static_cast<std::int32_t>(impl_->tokens.size());
}

std::optional<std::string_view> Tokenizer::TokenBytes(std::int32_t id) const {
  if (id < 0 || id >= vocab_size() || !impl_->tokens[id].exists) return std::nullopt;
  return impl_->tokens[id].bytes;
}

bool Tokenizer::IsSpecial(std::int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->tokens[id].special;
}

}  // namespace weft
