#include "router/text/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "router/text/byte_level.h"
#include "router/text/json_cursor.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

absl::Status Unsupported(const JsonCursor& at, std::string_view type, std::string_view allowed) {
  return at.Error(fmt::format("has type {}; supported are {}", type, allowed));
}

class Parser {
 public:
  explicit Parser(JsonCursor root) : root_(std::move(root)) {}

  absl::StatusOr<TokenizerSpec> Run() {
    ASSIGN_OR_RETURN(const JsonCursor model, root_.Get("model"));
    RETURN_IF_ERROR(Model(model));
    ASSIGN_OR_RETURN(const JsonCursor added_tokens, root_.Get("added_tokens"));
    if (!added_tokens.IsNull()) RETURN_IF_ERROR(AddedTokens(added_tokens));
    ASSIGN_OR_RETURN(const JsonCursor normalizer, root_.Get("normalizer"));
    if (!normalizer.IsNull()) RETURN_IF_ERROR(Normalizer(normalizer));
    ASSIGN_OR_RETURN(const JsonCursor pre_tokenizer, root_.Get("pre_tokenizer"));
    if (!pre_tokenizer.IsNull()) RETURN_IF_ERROR(PreTokenizerStep(pre_tokenizer));
    if (!has_byte_level_)
      return pre_tokenizer.Error("has no ByteLevel; only that BPE is supported");
    ASSIGN_OR_RETURN(const JsonCursor post_processor, root_.Get("post_processor"));
    if (!post_processor.IsNull()) RETURN_IF_ERROR(PostProcessor(post_processor));
    ASSIGN_OR_RETURN(const JsonCursor decoder, root_.Get("decoder"));
    RETURN_IF_ERROR(Decoder(decoder));
    return std::move(spec_);
  }

 private:
  absl::Status Model(const JsonCursor& model) {
    ASSIGN_OR_RETURN(const JsonCursor type, model.Get("type"));
    if (!type.IsNull()) {  // Files of old have none.
      ASSIGN_OR_RETURN(const std::string_view name, type.String());
      if (name != "BPE") return Unsupported(model, name, "BPE");
    }
    for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      ASSIGN_OR_RETURN(const JsonCursor member, model.Get(key));
      if (!member.IsNull() && member.value() != "") return member.Error("is not supported");
    }
    ASSIGN_OR_RETURN(const JsonCursor dropout, model.Get("dropout"));
    if (!dropout.IsNull() && dropout.value() != 0) return dropout.Error("is not supported");
    ASSIGN_OR_RETURN(const bool byte_fallback, model.GetBool("byte_fallback", false));
    if (byte_fallback) return model.Error("has byte_fallback, which is not supported");
    ASSIGN_OR_RETURN(spec_.bpe.ignore_merges, model.GetBool("ignore_merges", false));
    ASSIGN_OR_RETURN(spec_.bpe.fuse_unknown, model.GetBool("fuse_unk", false));

    ASSIGN_OR_RETURN(const JsonCursor vocab, model.Get("vocab"));
    RETURN_IF_ERROR(Vocabulary(vocab));
    ASSIGN_OR_RETURN(const JsonCursor merges, model.Get("merges"));
    RETURN_IF_ERROR(Merges(merges));
    ASSIGN_OR_RETURN(const JsonCursor unknown, model.Get("unk_token"));
    if (unknown.IsNull()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::string_view content, unknown.String());
    spec_.bpe.unknown = FindInVocabulary(content);
    if (!spec_.bpe.unknown) return unknown.Error(fmt::format("\"{}\" is not in vocab", content));
    return absl::OkStatus();
  }

  absl::Status Vocabulary(const JsonCursor& vocab) {
    if (!vocab.value().is_object()) return vocab.Error("must be an object of token to id");
    spec_.vocabulary.reserve(vocab.value().size());
    for (const auto& [content, _] : vocab.value().items()) {
      ASSIGN_OR_RETURN(const JsonCursor member, vocab.Get(content));
      ASSIGN_OR_RETURN(const std::int32_t id, member.Integer(kMaxTokenIds));
      if (!ids_.insert(id).second) {
        return vocab.Error(fmt::format("has id {} twice, the second time for \"{}\"", id, content));
      }
      spec_.vocabulary.emplace_back(content, id);
      vocabulary_.emplace(content, id);
      if (std::optional<std::string> bytes = ByteLevelBytes(content); bytes && !bytes->empty()) {
        spec_.bpe.tokens.emplace_back(*std::move(bytes), id);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Merges(const JsonCursor& merges) {
    if (!merges.value().is_array()) return merges.Error("must be an array");
    spec_.bpe.merges.reserve(merges.value().size());
    for (const nlohmann::json& entry : merges.value()) {
      const std::size_t index = spec_.bpe.merges.size();
      std::string left;
      std::string right;
      if (entry.is_string()) {
        const auto& text = entry.get_ref<const std::string&>();
        const std::size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
          return merges.Error(
              fmt::format("has \"{}\" at {}; it must be \"LEFT RIGHT\"", text, index));
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
                 entry[1].is_string()) {
        left = entry[0].get_ref<const std::string&>();
        right = entry[1].get_ref<const std::string&>();
      } else {
        return merges.Error(
            fmt::format("must have strings or pairs of strings, not so at {}", index));
      }
      const auto left_id = FindInVocabulary(left);
      const auto right_id = FindInVocabulary(right);
      const auto result_id = FindInVocabulary(left + right);
      if (!left_id || !right_id || !result_id) {
        const std::string missing = !left_id ? left : !right_id ? right : left + right;
        return merges.Error(
            fmt::format("needs \"{}\" at {}, which is not in vocab", missing, index));
      }
      spec_.bpe.merges.push_back({.left = *left_id, .right = *right_id, .result = *result_id});
    }
    return absl::OkStatus();
  }

  absl::Status AddedTokens(const JsonCursor& added_tokens) {
    ASSIGN_OR_RETURN(const std::vector<JsonCursor> elements, added_tokens.Elements());
    absl::flat_hash_set<std::string> contents;
    std::int32_t next_id = static_cast<std::int32_t>(vocabulary_.size());
    for (const JsonCursor& element : elements) {
      AddedToken token;
      ASSIGN_OR_RETURN(const std::string_view content, element.GetString("content"));
      token.content = content;
      ASSIGN_OR_RETURN(const JsonCursor id, element.Get("id"));
      ASSIGN_OR_RETURN(token.id, id.Integer(kMaxTokenIds));
      ASSIGN_OR_RETURN(token.single_word, element.GetBool("single_word", std::nullopt));
      ASSIGN_OR_RETURN(token.lstrip, element.GetBool("lstrip", std::nullopt));
      ASSIGN_OR_RETURN(token.rstrip, element.GetBool("rstrip", std::nullopt));
      ASSIGN_OR_RETURN(token.normalized, element.GetBool("normalized", std::nullopt));
      ASSIGN_OR_RETURN(token.special, element.GetBool("special", std::nullopt));
      if (token.content.empty()) return element.Error("has no content");
      if (!contents.insert(token.content).second) {
        return element.Error(fmt::format("repeats \"{}\"", token.content));
      }
      // Hugging Face numbers them itself and only warns if the file says otherwise.
      const std::optional<std::int32_t> in_vocabulary = FindInVocabulary(token.content);
      const std::int32_t id_given = in_vocabulary.value_or(next_id);
      if (token.id != id_given) {
        return id.Error(fmt::format("is {}; \"{}\" gets {}, {}", token.id, token.content, id_given,
                                    in_vocabulary ? "as in vocab" : "the next that is free"));
      }
      if (!in_vocabulary && !ids_.insert(token.id).second) {
        return id.Error(fmt::format("is {}, which another token has", token.id));
      }
      next_id = std::max(next_id, token.id + 1);
      spec_.added_tokens.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  absl::Status Normalizer(const JsonCursor& normalizer) {
    ASSIGN_OR_RETURN(const std::string_view type, normalizer.GetString("type"));
    if (type == "NFC") {
      spec_.normalize_nfc = true;  // Once is as good as twice.
      return absl::OkStatus();
    }
    if (type != "Sequence") return Unsupported(normalizer, type, "NFC, Sequence");
    return ForEach(normalizer, "normalizers", &Parser::Normalizer);
  }

  absl::Status PreTokenizerStep(const JsonCursor& step) {
    ASSIGN_OR_RETURN(const std::string_view type, step.GetString("type"));
    if (type == "Sequence") return ForEach(step, "pretokenizers", &Parser::PreTokenizerStep);
    if (has_byte_level_) return step.Error("comes after ByteLevel, which must be the last");
    if (type == "ByteLevel") return ByteLevelStep(step);
    if (type == "Digits") return DigitsStep(step);
    if (type == "Split") return SplitPatternStep(step);
    return Unsupported(step, type, "ByteLevel, Digits, Split, Sequence");
  }

  absl::Status ByteLevelStep(const JsonCursor& step) {
    has_byte_level_ = true;
    PreTokenizer& pre_tokenizer = spec_.pre_tokenizer;
    ASSIGN_OR_RETURN(pre_tokenizer.add_prefix_space,
                     step.GetBool("add_prefix_space", std::nullopt));
    pre_tokenizer.prefix_at = pre_tokenizer.steps.size();
    ASSIGN_OR_RETURN(const bool use_regex, step.GetBool("use_regex", true));
    if (!use_regex) return absl::OkStatus();
    ASSIGN_OR_RETURN(Pattern pattern, CompileByteLevelPattern());
    pre_tokenizer.steps.push_back({std::move(pattern), SplitBehavior::kIsolated});
    return absl::OkStatus();
  }

  absl::Status DigitsStep(const JsonCursor& step) {
    ASSIGN_OR_RETURN(const bool individual, step.GetBool("individual_digits", false));
    ASSIGN_OR_RETURN(Pattern pattern, CompileDigitsPattern());
    spec_.pre_tokenizer.steps.push_back(
        {std::move(pattern), individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous});
    return absl::OkStatus();
  }

  absl::Status SplitPatternStep(const JsonCursor& step) {
    ASSIGN_OR_RETURN(const std::string_view behavior, step.GetString("behavior"));
    ASSIGN_OR_RETURN(const bool invert, step.GetBool("invert", false));
    const std::optional<SplitBehavior> known = FindBehavior(behavior);
    if (!known) return step.Error(fmt::format("has behavior {}, which is unknown", behavior));

    ASSIGN_OR_RETURN(const JsonCursor pattern, step.Get("pattern"));
    ASSIGN_OR_RETURN(const JsonCursor regex, pattern.Get("Regex"));
    ASSIGN_OR_RETURN(const std::string_view text,
                     regex.IsNull() ? pattern.GetString("String") : regex.String());
    absl::StatusOr<Pattern> compiled =
        regex.IsNull() ? Pattern::CompileLiteral(text) : Pattern::Compile(text);
    if (!compiled.ok()) {
      const absl::string_view message = compiled.status().message();
      return step.Error(fmt::format("has {}", std::string_view(message.data(), message.size())));
    }
    spec_.pre_tokenizer.steps.push_back({*std::move(compiled), *known, invert});
    return absl::OkStatus();
  }

  static std::optional<SplitBehavior> FindBehavior(std::string_view name) {
    if (name == "Removed") return SplitBehavior::kRemoved;
    if (name == "Isolated") return SplitBehavior::kIsolated;
    if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
    if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
    if (name == "Contiguous") return SplitBehavior::kContiguous;
    return std::nullopt;
  }

  absl::Status PostProcessor(const JsonCursor& processor) {
    ASSIGN_OR_RETURN(const std::string_view type, processor.GetString("type"));
    if (type == "Sequence") return ForEach(processor, "processors", &Parser::PostProcessor);
    if (type == "ByteLevel") return absl::OkStatus();  // It only moves offsets.
    if (type != "TemplateProcessing") {
      return Unsupported(processor, type, "ByteLevel, TemplateProcessing, Sequence");
    }
    if (has_template_) return processor.Error("is a second TemplateProcessing");
    has_template_ = true;
    ASSIGN_OR_RETURN(const JsonCursor single, processor.Get("single"));
    ASSIGN_OR_RETURN(const JsonCursor special_tokens, processor.Get("special_tokens"));
    ASSIGN_OR_RETURN(const std::vector<JsonCursor> pieces, single.Elements());
    bool after_text = false;
    for (const JsonCursor& piece : pieces) {
      ASSIGN_OR_RETURN(const JsonCursor special, piece.Get("SpecialToken"));
      if (!special.IsNull()) {
        RETURN_IF_ERROR(
            TemplateToken(special, special_tokens, after_text ? spec_.suffix : spec_.prefix));
        continue;
      }
      ASSIGN_OR_RETURN(const JsonCursor sequence, piece.Get("Sequence"));
      ASSIGN_OR_RETURN(const std::string_view which, sequence.GetString("id"));
      if (which != "A" || after_text) return piece.Error("must be the only sequence, A");
      after_text = true;
    }
    if (!after_text) return single.Error("has no sequence A");
    return absl::OkStatus();
  }

  absl::Status TemplateToken(const JsonCursor& special, const JsonCursor& special_tokens,
                             std::vector<std::int32_t>& ids) {
    ASSIGN_OR_RETURN(const std::string_view name, special.GetString("id"));
    ASSIGN_OR_RETURN(const JsonCursor token, special_tokens.Get(name));
    ASSIGN_OR_RETURN(const JsonCursor token_ids, token.Get("ids"));
    ASSIGN_OR_RETURN(const std::vector<JsonCursor> elements, token_ids.Elements());
    for (const JsonCursor& element : elements) {
      ASSIGN_OR_RETURN(const std::int32_t id, element.Integer(kMaxTokenIds));
      if (!ids_.contains(id)) return element.Error(fmt::format("is {}, which is no token", id));
      ids.push_back(id);
    }
    return absl::OkStatus();
  }

  absl::Status Decoder(const JsonCursor& decoder) {
    if (decoder.IsNull()) return decoder.Error("is missing; it must be ByteLevel");
    ASSIGN_OR_RETURN(const std::string_view type, decoder.GetString("type"));
    if (type != "Sequence") {
      return type == "ByteLevel" ? absl::OkStatus() : Unsupported(decoder, type, "ByteLevel");
    }
    ASSIGN_OR_RETURN(const JsonCursor member, decoder.Get("decoders"));
    ASSIGN_OR_RETURN(const std::vector<JsonCursor> decoders, member.Elements());
    if (decoders.size() != 1) return decoder.Error("must have one decoder, ByteLevel");
    return Decoder(decoders[0]);
  }

  absl::Status ForEach(const JsonCursor& at, std::string_view key,
                       absl::Status (Parser::*parse)(const JsonCursor&)) {
    ASSIGN_OR_RETURN(const JsonCursor member, at.Get(key));
    ASSIGN_OR_RETURN(const std::vector<JsonCursor> elements, member.Elements());
    for (const JsonCursor& element : elements) RETURN_IF_ERROR((this->*parse)(element));
    return absl::OkStatus();
  }

  std::optional<std::int32_t> FindInVocabulary(std::string_view content) const {
    const auto found = vocabulary_.find(absl::string_view(content.data(), content.size()));
    if (found == vocabulary_.end()) return std::nullopt;
    return found->second;
  }

  const JsonCursor root_;
  TokenizerSpec spec_;
  absl::flat_hash_map<std::string, std::int32_t> vocabulary_;
  absl::flat_hash_set<std::int32_t> ids_;
  bool has_byte_level_ = false;
  bool has_template_ = false;
};

}  // namespace

absl::StatusOr<TokenizerSpec> ParseTokenizerJson(std::string_view json, std::string_view name) {
  ASSIGN_OR_RETURN(const nlohmann::json document, ParseTextJson(json, name));
  return Parser(JsonCursor(document, name)).Run();
}

}  // namespace weft
