#pragma once

#include <cstdint>
#include <string>

namespace weft {

// What a rank tells its leader of a KV transfer.
struct KvReport {
  enum class Kind : std::uint8_t {
    kOpened,    // it can receive now
    kProgress,  // something has come or was taken; once a second at most
    kDone,      // all of this rank's part has come or was taken; the last one
    kFailed,    // `error` says why; the last one
  };
  std::uint64_t transfer = 0;
  Kind kind{};
  std::string error;
  std::int64_t bytes = 0;  // that this rank has moved for it
};

}  // namespace weft
