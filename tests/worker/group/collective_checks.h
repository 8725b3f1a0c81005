#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/stream.h"
#include "tests/worker/group/rank_processes.h"

namespace weft {

// Host collectives ignore their stream.
class NoStream final : public kernels::Stream {
 public:
  kernels::DeviceKind device() const override { return kernels::DeviceKind::kCpu; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

// Runs every collective over sizes 0, 1, odd, around the piece size and large, in memory of the
// communicator and in other memory, in place and not, compares bit by bit with brute force,
// compares received_bytes with the formulas of dcp.md, and stalls ranks at random by `seed`.
std::string CheckCollectives(RankContext& context, std::uint64_t seed);

}  // namespace weft
