#pragma once

namespace weft {

// A wrong flag, file or model: starting again cannot help, so a supervisor stops everything and
// exits with the same code. EX_CONFIG of sysexits.h.
inline constexpr int kExitConfigError = 78;

// The supervisor of this process is gone; see SupervisorLink.
inline constexpr int kExitSupervisorGone = 79;

}  // namespace weft
