#include "server/base/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace weft {
namespace {

std::atomic<bool> failed{false};
std::atomic<int> first_error{0};  // 0 when the library left none

void Remember() {
  if (!failed.exchange(true)) first_error = errno;
}

}  // namespace

void HoldStandardFiles() {
  int fd = 0;
  do {
    fd = open("/dev/null", O_RDONLY);  // the lowest number that is free
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

void PrintOut(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    Remember();
  }
}

bool OutputFailed() { return failed; }

int FinishOutput(int exit_code) {
  PrintOut("");
  // What std::cout could not write left no reason.
  if (!failed && std::ferror(stdout) == 0) return exit_code;
  PrintErr("weft: standard output: {}\n",
           first_error != 0 ? std::strerror(first_error) : "cannot be written");
  return exit_code == 0 ? 1 : exit_code;
}

void PrintErrText(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stderr) != text.size()) std::clearerr(stderr);
}

}  // namespace weft
