#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "client/commands.h"
#include "fmt/format.h"
#include "server/base/output.h"
#include "server/exit_codes.h"
#include "server/supervisor.h"

namespace weft {

// Layouts are the worker's business: another program knows them.
int PlanCommand(int argc, char** argv) {
  (void)argc;
  const std::string program = SiblingProgram("weft-plan");
  execv(program.c_str(), argv);
  PrintErr("weft plan: {}: {}\n", program, std::strerror(errno));
  return kExitConfigError;
}

}  // namespace weft
