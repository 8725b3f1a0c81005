#include "server/grpc_status.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace weft {
namespace {

constexpr char kDomain[] = "weft";

std::string ErrorDetails(const absl::Status& status) {
  google::rpc::Status details;
  if (const std::string reason = ReasonOf(status); !reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kDomain);
    details.add_details()->PackFrom(info);
  }
  if (const std::optional<absl::Duration> delay = RetryAfterOf(status); delay.has_value()) {
    google::rpc::RetryInfo retry;
    absl::Duration rest;
    retry.mutable_retry_delay()->set_seconds(absl::IDivDuration(*delay, absl::Seconds(1), &rest));
    retry.mutable_retry_delay()->set_nanos(static_cast<int>(absl::ToInt64Nanoseconds(rest)));
    details.add_details()->PackFrom(retry);
  }
  if (details.details().empty()) return {};
  details.set_code(static_cast<int>(status.code()));
  details.set_message(std::string(status.message()));
  return details.SerializeAsString();
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The numbers of the codes are the same in both.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      std::string(status.message()), ErrorDetails(status));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) {
    return result;
  }
  for (const google::protobuf::Any& any : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info) && info.domain() == kDomain) {
      result = WithReason(std::move(result), info.reason());
    } else if (any.UnpackTo(&retry)) {
      result =
          WithRetryAfter(std::move(result), absl::Seconds(retry.retry_delay().seconds()) +
                                                absl::Nanoseconds(retry.retry_delay().nanos()));
    }
  }
  return result;
}

}  // namespace weft
