#pragma once

#include <string_view>

namespace weft {

// Writes to standard output and flushes it. What cannot be written is remembered for
// FinishOutput().
void PrintOut(std::string_view text);

// The last thing a program does: `exit_code`, or 1 with a line on standard error when some of its
// output could not be written (a full disk, say).
int FinishOutput(int exit_code);

}  // namespace weft
