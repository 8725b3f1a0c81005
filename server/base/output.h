#pragma once

#include <string_view>
#include <utility>

#include "fmt/format.h"

namespace weft {

// Standard output and standard error of a program that may lose either: a full disk, a closed pipe.

// The first thing that main() does. A standard file that is closed becomes one that cannot be
// written and is empty, so that nothing opened later takes its number: log lines would go there.
void HoldStandardFiles();

// Writes to standard output and flushes it. What cannot be written is remembered for OutputFailed()
// and FinishOutput().
void PrintOut(std::string_view text);

// Whether something could not be written: the rest of the work is for nobody.
bool OutputFailed();

// The last thing a program does: `exit_code`, or 1 with a line on standard error when some of its
// output could not be written.
int FinishOutput(int exit_code);

// Writes to standard error. What cannot be written is lost: nobody reads it.
void PrintErrText(std::string_view text);
template <typename... Args>
void PrintErr(fmt::format_string<Args...> format, Args&&... args) {
  PrintErrText(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace weft
