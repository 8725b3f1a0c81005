#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace weft {

// Why a call failed, for programs: google.rpc.ErrorInfo.reason with the domain "weft". Travels
// inside an absl::Status and, through grpc_status.h, over gRPC.
// The first six pass with time: their errors advise when to try again.
inline constexpr std::string_view kReasonOverloaded = "OVERLOADED";  // a queue is full
inline constexpr std::string_view kReasonDraining = "DRAINING";      // stops; ask another one
inline constexpr std::string_view kReasonRankLost = "RANK_LOST";     // the group restarts
inline constexpr std::string_view kReasonNotReady = "NOT_READY";     // still loading
// What a tenant may do: requests at a time, and tokens over time.
inline constexpr std::string_view kReasonConcurrencyLimit = "CONCURRENCY_LIMIT_EXCEEDED";
inline constexpr std::string_view kReasonRateLimit = "RATE_LIMIT_EXCEEDED";
inline constexpr std::string_view kReasonKvTransferFailed = "KV_TRANSFER_FAILED";
inline constexpr std::string_view kReasonSlowReader = "SLOW_READER";  // the stream's buffer is full
inline constexpr std::string_view kReasonOutOfLimits = "OUT_OF_LIMITS";  // can never be served here

// `status` with `reason` attached (it replaces an earlier one); an OK status stays as it is.
absl::Status WithReason(absl::Status status, std::string_view reason);
// Empty when there is none.
std::string ReasonOf(const absl::Status& status);

// `status` with the advice to try again after `delay`: google.rpc.RetryInfo.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);
// That of WithRetryAfter(), else that of the reason, for reasons that pass with time.
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

}  // namespace weft
