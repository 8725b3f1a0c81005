#include "client/output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "fmt/format.h"

namespace weft {
namespace {

int first_error = 0;

void Flush() {
  if (std::fflush(stdout) != 0 && first_error == 0) first_error = errno;
}

}  // namespace

void PrintOut(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && first_error == 0) {
    first_error = errno;
  }
  Flush();
}

int FinishOutput(int exit_code) {
  Flush();
  if (std::ferror(stdout) == 0) return exit_code;
  // What std::cout could not write left no reason.
  fmt::print(stderr, "weft: standard output: {}\n",
             first_error != 0 ? std::strerror(first_error) : "cannot be written");
  return exit_code == 0 ? 1 : exit_code;
}

}  // namespace weft
