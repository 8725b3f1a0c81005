#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"
#include "server/error_reason.h"

namespace weft {

// The one place where absl::Status and grpc::Status meet. Code and message carry over; the reason
// and the retry delay of error_reason.h become google.rpc.ErrorInfo (domain "weft") and
// google.rpc.RetryInfo in the binary error details, and come back from there. Details of other
// domains, or that do not parse, are dropped.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace weft
