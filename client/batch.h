#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "client/completion.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {

// When what of one request came, on this side of the network.
struct RequestTiming {
  absl::Time start;                // as it was sent
  absl::Time end;                  // its status
  std::vector<absl::Time> tokens;  // each message that had tokens
};

struct BatchOptions {
  std::size_t concurrency = 64;  // requests under way at a time
  // By request: when it is sent at the soonest, after the start of the batch. Growing. Empty: all
  // at once, as far as concurrency allows.
  std::vector<absl::Duration> send_at;
  // Asked after every message and completion, on any thread: false cancels what is under way and
  // sends nothing more. May be null.
  std::function<bool()> go_on;
  // Every message as it comes, on gRPC's threads; one at a time per request. May be null.
  std::function<void(std::size_t index, const v1::GenerateResponse& response)> on_message;
  // Every completion, in the order of the requests, on the calling thread. May be null.
  std::function<void(std::size_t index, const Completion& completion, const RequestTiming& timing)>
      on_completion;
};

// What a batch did, for the summary line.
struct BatchStats {
  std::size_t failed = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;
  absl::Duration wall_time;            // of the whole batch
  absl::Duration time_to_first_token;  // mean over the requests that got one
};

// Sends every request, and returns when the last one has ended, however it did.
BatchStats RunBatch(v1::Inference::Stub& stub, const std::vector<v1::GenerateRequest>& requests,
                    const BatchOptions& options);

}  // namespace weft
