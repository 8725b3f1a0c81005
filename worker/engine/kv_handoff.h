#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace weft {

// What a sequence needs whose prompt is computed on one group and whose output on another.
struct KvHandoff {
  bool sends = false;                         // else it receives
  std::uint64_t transfer = 0;                 // unique for ever; the decode group drew it
  std::shared_ptr<const std::string> target;  // of who sends: KvOp::target
  std::int64_t first_position = 0;            // what is before is at the receiver already
  std::int64_t max_length = 0;                // prompt and output, of the whole request

  bool opened = false;          // the ranks have been told of it
  std::int32_t num_opened = 0;  // ranks that are ready to receive
  std::int32_t num_done = 0;    // ranks whose part is done
  bool renewed = true;          // something has happened since Engine::Step() looked
  absl::Time lease_end = absl::InfiniteFuture();
  absl::Time opened_at = absl::InfiniteFuture();
  std::optional<std::int32_t> first_token;  // sampled by the sender
};

}  // namespace weft
