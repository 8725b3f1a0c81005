#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/group_flags.h"
#include "weft/v1/worker.pb.h"
#include "worker/engine/engine.h"

namespace weft {

// What a group's model says of requests.
struct ModelTokens {
  std::int32_t vocab_size = 0;
  absl::Span<const std::int32_t> eos_token_ids;
};

// INVALID_ARGUMENT, naming the field, what was seen and what is allowed: a missing seed, more of
// something than `limits` allow. What CheckRequest() refuses is left to it.
absl::StatusOr<EngineRequest> ToEngineRequest(const v1::WorkerGenerateRequest& request,
                                              const ModelTokens& model, const WorkerLimits& limits,
                                              absl::Time deadline);

// The part of `request` that concerns a hand-off between groups, which is of KV in `own_format`
// (empty: this group takes part in none). FAILED_PRECONDITION (KV_TRANSFER_FAILED) when the other
// group's format is another; INVALID_ARGUMENT for prompt_logprobs, and a target that is none.
absl::Status SetHandoff(const v1::WorkerGenerateRequest& request, const std::string& own_format,
                        EngineRequest& out);

// `event` as a message; only for events that are not an error: kNone, kStopToken, kEos, kLength.
v1::WorkerGenerateResponse ToResponse(const TokenEvent& event);

// For StreamWriterOptions: the size of a message in memory, about, and the union of two.
std::int64_t ResponseBytes(const v1::WorkerGenerateResponse& response);
bool MergeResponses(v1::WorkerGenerateResponse& into, v1::WorkerGenerateResponse& next);

}  // namespace weft
