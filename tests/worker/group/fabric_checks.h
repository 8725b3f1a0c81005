#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tests/worker/group/rank_processes.h"

namespace weft {

// Every rank sends every rank (itself too) messages of all sizes, 0 bytes to `largest_bytes`, over
// all channels but kCollective, in 1..kMaxSpans spans, and checks that what it gets is whole,
// aligned and in the order of each sender over all channels; then compares the counters.
std::string CheckOrder(RankContext& context, std::uint64_t seed, int num_messages,
                       std::int64_t largest_bytes);

// Wake() from another thread ends a long Wait(), whether it comes before or during it.
std::string CheckWake(RankContext& context);

// A fabric whose peers are gone one after the other in the middle of messages, and are
// disconnected, does not grow.
std::string CheckDisconnect(const std::function<std::unique_ptr<Fabric>()>& make);

// What Send() and Connect() refuse.
std::string CheckRefusals(RankContext& context);

}  // namespace weft
