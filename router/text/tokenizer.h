#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace weft {

// Text to token ids, exactly as Hugging Face's tokenizers library does with the same
// tokenizer.json, for byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek, SmolLM2 and their like).
//
// Threading: immutable after Load(); every method may be called from any thread at once.
class Tokenizer {
 public:
  // Reads the file at `path` (MODEL_DIR/tokenizer.json). NOT_FOUND if it cannot be opened;
  // INVALID_ARGUMENT, naming file and key, if it is not valid or needs what this class lacks
  // (Unigram, WordPiece, Metaspace, byte fallback, ...).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& path);

  // As Load(), from the text of the file; `name` stands for it in error messages.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(std::string_view json,
                                                          std::string_view name);

  ~Tokenizer();

  // The ids of `text`. Added tokens spelled in the text ("<|im_end|>") become their ids.
  // `add_special_tokens` adds what the file's post-processor says, such as a beginning of
  // sequence; without it nothing is added. INVALID_ARGUMENT, naming the offset, if `text` is not
  // UTF-8; RESOURCE_EXHAUSTED if it is over kMaxTextBytes or a pattern of the file gives up on it.
  absl::StatusOr<std::vector<std::int32_t>> Encode(std::string_view text,
                                                   bool add_special_tokens) const;

  static constexpr std::int64_t kMaxTextBytes = std::int64_t{64} << 20;

  // One more than the largest id. A model's vocabulary may be larger (padding), never smaller.
  std::int32_t vocab_size() const;

  // The bytes `id` decodes to, for a special token its name; empty optional if there is no such
  // token. They need not be UTF-8: a character may be spread over several tokens.
  std::optional<std::string_view> TokenBytes(std::int32_t id) const;

  // Whether `id` is a special token, which detokenizing skips unless asked not to.
  bool IsSpecial(std::int32_t id) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);

  std::unique_ptr<const Impl> impl_;
};

}  // namespace weft
