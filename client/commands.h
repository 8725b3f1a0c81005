#pragma once

namespace weft {

// The commands of `weft`. Each parses its own options (argv[0] is the command's name) and returns
// the exit code of the program.
int ServeCommand(int argc, char** argv);
int GenerateCommand(int argc, char** argv);
int BenchCommand(int argc, char** argv);
int StatusCommand(int argc, char** argv);
int PlanCommand(int argc, char** argv);

}  // namespace weft
