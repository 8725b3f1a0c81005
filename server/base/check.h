#pragma once

#include <string_view>

// For broken invariants only: prints file, line, the expression and `message`, then aborts.
// What a caller or the world can cause is an absl::Status instead.
#define CHECK(condition) \
  (static_cast<bool>(condition) ? void() : ::weft::CheckFailed(__FILE__, __LINE__, #condition, {}))
#define CHECK_MSG(condition, message)    \
  (static_cast<bool>(condition) ? void() \
                                : ::weft::CheckFailed(__FILE__, __LINE__, #condition, message))

#ifdef NDEBUG
#define DCHECK(condition) CHECK(true || (condition))
#else
#define DCHECK(condition) CHECK(condition)
#endif

namespace weft {

[[noreturn]] void CheckFailed(const char* file, int line, const char* expression,
                              std::string_view message);

}  // namespace weft
