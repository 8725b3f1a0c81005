#include "server/grpc_status.h"

#include <string>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(GrpcStatusTest, EveryCodeAndMessageComesBack) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code),
                              code == 0 ? "" : "what: \xc3\xa9");
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status) << code;
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
  }
}

TEST(GrpcStatusTest, ReasonAndRetryDelayComeBack) {
  const absl::Status plain = absl::UnavailableError("gone");
  EXPECT_EQ(ReasonOf(plain), "");
  EXPECT_EQ(RetryAfterOf(plain), std::nullopt);
  EXPECT_EQ(ToGrpcStatus(plain).error_details(), "");
  for (const absl::Duration delay :
       {absl::ZeroDuration(), absl::Milliseconds(1500), absl::Hours(30), absl::Nanoseconds(1)}) {
    const absl::Status back =
        FromGrpcStatus(ToGrpcStatus(WithRetryAfter(WithReason(plain, kReasonRankLost), delay)));
    EXPECT_EQ(back.code(), plain.code());
    EXPECT_EQ(back.message(), plain.message());
    EXPECT_EQ(ReasonOf(back), "RANK_LOST");
    EXPECT_EQ(RetryAfterOf(back), delay);
  }
  EXPECT_EQ(ReasonOf(WithReason(WithReason(plain, "A"), "B")), "B");
  EXPECT_TRUE(WithReason(absl::OkStatus(), "A").ok());
}

TEST(GrpcStatusTest, ReasonsThatPassSayWhenToTryAgain) {
  for (const std::string_view reason :
       {kReasonOverloaded, kReasonDraining, kReasonRankLost, kReasonNotReady}) {
    const absl::Status status = WithReason(absl::UnavailableError("x"), reason);
    const absl::Status back = FromGrpcStatus(ToGrpcStatus(status));
    EXPECT_GT(RetryAfterOf(back), absl::ZeroDuration()) << reason;
    EXPECT_EQ(ReasonOf(back), reason);
    // What was said wins.
    EXPECT_EQ(RetryAfterOf(WithRetryAfter(status, absl::Hours(1))), absl::Hours(1));
  }
  for (const std::string_view reason : {kReasonSlowReader, kReasonOutOfLimits}) {
    EXPECT_EQ(RetryAfterOf(WithReason(absl::InternalError("x"), reason)), std::nullopt) << reason;
  }
}

// What other gRPC implementations read: google.rpc.Status{code 14, message, details {Any{url,
// ErrorInfo{1: reason, 2: domain}}}}, spelled out by hand from the public definition.
TEST(GrpcStatusTest, DetailsHaveTheWireFormatOfGoogleRpc) {
  const std::string info = std::string("\x0a\x09SOMETHING") + "\x12\x04weft";
  const std::string url = "type.googleapis.com/google.rpc.ErrorInfo";
  const std::string any = "\x0a" + std::string(1, static_cast<char>(url.size())) + url + "\x12" +
                          std::string(1, static_cast<char>(info.size())) + info;
  const std::string expected = std::string("\x08\x0e") + "\x12\x04gone" + "\x1a" +
                               std::string(1, static_cast<char>(any.size())) + any;
  EXPECT_EQ(ToGrpcStatus(WithReason(absl::UnavailableError("gone"), "SOMETHING")).error_details(),
            expected);
}

TEST(GrpcStatusTest, DetailsThatAreNotOursAreDropped) {
  const absl::Status garbage =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "m", "\xff\xff not a proto"));
  EXPECT_EQ(garbage, absl::InternalError("m"));
  // ErrorInfo of another domain.
  grpc::Status other = ToGrpcStatus(WithReason(absl::InternalError("m"), "R"));
  std::string details = other.error_details();
  details.replace(details.find("weft"), 4, "else");
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "m", details)),
            absl::InternalError("m"));
}

}  // namespace
}  // namespace weft
