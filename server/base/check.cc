#include "server/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace weft {

void CheckFailed(const char* file, int line, const char* expression, std::string_view message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %.*s\n", file, line, expression,
               static_cast<int>(message.size()), message.data());
  std::abort();
}

}  // namespace weft
