#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weft {

struct ChatTurn {
  std::string_view role;
  std::string_view content;
};

// A model's chat template: turns to the text that its tokenizer takes, with an assistant's turn
// begun at the end, as Hugging Face's apply_chat_template() renders it.
//
// Threading: immutable; Render() may be called from any thread at once.
class ChatTemplate {
 public:
  // Reads MODEL_DIR/chat_template.jinja, else chat_template of MODEL_DIR/tokenizer_config.json,
  // and there the names of special tokens. NOT_FOUND when the model has none; INVALID_ARGUMENT,
  // naming file and line, when it is broken or needs what is not supported.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& model_dir);

  ~ChatTemplate();

  // INVALID_ARGUMENT when the template refuses the turns or cannot render them; RESOURCE_EXHAUSTED
  // when it takes more than it may.
  absl::StatusOr<std::string> Render(absl::Span<const ChatTurn> turns,
                                     bool add_generation_prompt = true) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<const Impl> impl);

  std::unique_ptr<const Impl> impl_;
};

}  // namespace weft
