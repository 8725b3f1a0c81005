#include <cstddef>
#include <cstdint>
#include <string_view>

#include "router/text/detokenizer.h"
#include "router/text/tokenizer.h"
#include "router/text/utf8.h"
#include "server/base/check.h"

// A tokenizer.json that is accepted encodes texts to ids of its own, and decodes any of them.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = weft::Tokenizer::Parse(json, "fuzz");
  if (!tokenizer.ok()) return 0;
  const std::int32_t vocab_size = (*tokenizer)->vocab_size();
  for (const std::string_view text :
       {"", " the then 123 don't\n\n  x", "é日本\u00a0🏳️ <a>abab"}) {
    const auto ids = (*tokenizer)->Encode(text, /*add_special_tokens=*/true);
    if (!ids.ok()) continue;  // a pattern may give up
    for (const std::int32_t id : *ids) CHECK(0 <= id && id < vocab_size);
    const std::string decoded = weft::Detokenize(**tokenizer, *ids);
    CHECK(!weft::FindInvalidUtf8(decoded).has_value());
  }
  return 0;
}
