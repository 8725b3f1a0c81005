#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "router/text/jinja_template.h"

// Any template ends, within its limits.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using weft::jinja::Dict;
  using weft::jinja::List;
  using weft::jinja::Value;
  const auto parsed = weft::jinja::Template::Parse({reinterpret_cast<const char*>(data), size});
  if (!parsed.ok()) return 0;
  List messages;
  for (const char* role : {"system", "user", "assistant"}) {
    messages.emplace_back(Dict{{"role", Value(std::string(role))},
                               {"content", Value(std::string(" a,b <think>é</think>\n"))}});
  }
  Dict variables = {{"messages", Value(std::move(messages))},
                    {"add_generation_prompt", Value::Bool(true)},
                    {"bos_token", Value(std::string("<s>"))},
                    {"n", Value::Int(7)},
                    {"tools", Value()}};
  (void)parsed->Render(variables, {.max_steps = 20000, .max_bytes = 1 << 20});
  return 0;
}
