#include "server/base/quoted.h"

#include <cctype>

namespace weft {

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMost = 100;
  std::string quoted = "\"";
  for (const char c : text.substr(0, kMost)) {
    quoted += std::iscntrl(static_cast<unsigned char>(c)) != 0 ? '?' : c;
  }
  return quoted + (text.size() > kMost ? "...\"" : "\"");
}

}  // namespace weft
