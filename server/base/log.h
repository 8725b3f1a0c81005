#pragma once

#include <string_view>

#include "spdlog/spdlog.h"

// Log lines go to stderr, through spdlog: spdlog::info("loaded {} tensors in {:.1f} s", n, s).
// Standard output belongs to what a command was asked to print.

namespace weft {

// Sets the sink, the pattern (time, level, `process_name`) and the level
// ("debug", "info", "warn", "error"). Call once, at the start of main().
void InitLog(std::string_view process_name, std::string_view level);

}  // namespace weft
