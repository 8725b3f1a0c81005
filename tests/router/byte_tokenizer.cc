#include "tests/router/byte_tokenizer.h"

#include <string>
#include <utility>

#include "nlohmann/json.hpp"
#include "router/text/byte_level.h"
#include "server/base/check.h"

namespace weft {

std::unique_ptr<Tokenizer> ByteTokenizer() {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocab[ByteLevelSpelling(static_cast<std::uint8_t>(byte))] = byte;
  }
  const nlohmann::json file = {
      {"version", "1.0"},
      {"added_tokens",
       {{{"id", kEndToken},
         {"content", "<end>"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
  auto tokenizer = Tokenizer::Parse(file.dump(), "bytes");
  CHECK_MSG(tokenizer.ok(), std::string(tokenizer.status().message()));
  return *std::move(tokenizer);
}

std::vector<std::int32_t> ByteIds(std::string_view text) {
  return {reinterpret_cast<const unsigned char*>(text.data()),
          reinterpret_cast<const unsigned char*>(text.data()) + text.size()};
}

}  // namespace weft
