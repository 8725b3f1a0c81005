#include "server/base/output.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(OutputTest, NothingTakesTheNumberOfAClosedStandardFile) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(fd);
    HoldStandardFiles();
    const bool free = open("/dev/null", O_RDWR) > STDERR_FILENO;
    const bool refused = write(STDERR_FILENO, "x", 1) < 0 && errno == EBADF;
    char byte = 0;
    const bool empty = read(STDIN_FILENO, &byte, 1) == 0;
    _exit(free && refused && empty ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace weft
