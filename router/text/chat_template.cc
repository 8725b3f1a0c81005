#include "router/text/chat_template.h"

#include <fmt/format.h>

#include <utility>

#include "absl/status/status.h"
#include "router/text/jinja_template.h"
#include "router/text/json_cursor.h"
#include "server/base/read_file.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{16} << 20;

// The names of special tokens that tokenizer_config.json may give, as templates know them.
absl::StatusOr<jinja::Dict> SpecialTokens(const JsonCursor& config) {
  jinja::Dict tokens;
  for (const std::string_view key : {"bos_token", "eos_token", "unk_token", "sep_token",
                                     "pad_token", "cls_token", "mask_token"}) {
    ASSIGN_OR_RETURN(JsonCursor token, config.Get(key));
    if (token.IsNull()) continue;
    if (token.value().is_object()) {
      ASSIGN_OR_RETURN(token, token.Get("content"));
    }
    ASSIGN_OR_RETURN(const std::string_view text, token.String());
    tokens.emplace_back(std::string(key), jinja::Value(std::string(text)));
  }
  return tokens;
}

// A string, or a list of named ones of which "default" is meant. Empty when there is none.
absl::StatusOr<std::string> TemplateOf(const JsonCursor& config) {
  ASSIGN_OR_RETURN(const JsonCursor member, config.Get("chat_template"));
  if (member.IsNull()) return "";
  if (!member.value().is_array()) {
    ASSIGN_OR_RETURN(const std::string_view text, member.String());
    return std::string(text);
  }
  ASSIGN_OR_RETURN(const std::vector<JsonCursor> named, member.Elements());
  for (const JsonCursor& entry : named) {
    ASSIGN_OR_RETURN(const std::string_view name, entry.GetString("name"));
    if (name != "default") continue;
    ASSIGN_OR_RETURN(const std::string_view text, entry.GetString("template"));
    return std::string(text);
  }
  return member.Error("has no template named \"default\"");
}

}  // namespace

struct ChatTemplate::Impl {
  std::string name;  // of the file, for messages
  jinja::Template parsed;
  jinja::Dict special_tokens;
};

ChatTemplate::ChatTemplate(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(const std::string& model_dir) {
  const std::string config_path = model_dir + "/tokenizer_config.json";
  jinja::Dict special_tokens;
  std::string source;
  std::string name = config_path;
  absl::StatusOr<std::string> text = ReadFile(config_path, kMaxFileBytes);
  if (text.ok()) {
    ASSIGN_OR_RETURN(const nlohmann::json document, ParseTextJson(*text, config_path));
    const JsonCursor config(document, config_path);
    ASSIGN_OR_RETURN(special_tokens, SpecialTokens(config));
    ASSIGN_OR_RETURN(source, TemplateOf(config));
  } else if (!absl::IsNotFound(text.status())) {
    return text.status();
  }
  const std::string file_path = model_dir + "/chat_template.jinja";
  if (absl::StatusOr<std::string> file = ReadFile(file_path, kMaxFileBytes); file.ok()) {
    source = *std::move(file);
    name = file_path;
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  if (source.empty()) {
    return absl::NotFoundError(
        fmt::format("there is neither {} nor chat_template in {}", file_path, config_path));
  }
  absl::StatusOr<jinja::Template> parsed = jinja::Template::Parse(source);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("the chat template of {}: {}", name, std::string(parsed.status().message())));
  }
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(
      std::unique_ptr<const Impl>(new Impl{.name = std::move(name),
                                           .parsed = *std::move(parsed),
                                           .special_tokens = std::move(special_tokens)})));
}

absl::StatusOr<std::string> ChatTemplate::Render(absl::Span<const ChatTurn> turns,
                                                 bool add_generation_prompt) const {
  jinja::List messages;
  for (const ChatTurn& turn : turns) {
    messages.emplace_back(jinja::Dict{{"role", jinja::Value(std::string(turn.role))},
                                      {"content", jinja::Value(std::string(turn.content))}});
  }
  jinja::Dict variables = impl_->special_tokens;
  variables.emplace_back("messages", jinja::Value(std::move(messages)));
  variables.emplace_back("add_generation_prompt", jinja::Value::Bool(add_generation_prompt));
  variables.emplace_back("tools", jinja::Value());
  variables.emplace_back("documents", jinja::Value());
  absl::StatusOr<std::string> text = impl_->parsed.Render(variables);
  if (text.ok()) return text;
  return absl::Status(text.status().code(), fmt::format("the chat template of {}: {}", impl_->name,
                                                        std::string(text.status().message())));
}

}  // namespace weft
