#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {

// Asks the router; the error is gRPC's (UNAVAILABLE when nobody listens, DEADLINE_EXCEEDED).
absl::StatusOr<v1::GetServerInfoResponse> FetchServerInfo(v1::Inference::Stub& stub,
                                                          absl::Duration timeout);

// The vocabulary of the served model; 256 when the router does not tell.
std::int32_t FetchVocabSize(v1::Inference::Stub& stub, absl::Duration timeout);

// For people: a line per group, and below it one per rank.
std::string FormatServerInfo(const v1::GetServerInfoResponse& info);

// The message as JSON with the names of the proto and every scalar field, on one line.
std::string ServerInfoToJson(const v1::GetServerInfoResponse& info);

// One line on how a group shards its KV cache: "2 ranks, KV shared by 2, ...".
std::string DescribeLayout(const v1::GroupInfo& group);

}  // namespace weft
