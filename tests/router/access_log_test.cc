// One line for each call, without what was said; and the client's trace, all the way.
#include "router/access_log.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/base/mutex.h"
#include "server/error_reason.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

constexpr char kTrace[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceparentTest, IsVersionZeroInLowerCase) {
  EXPECT_TRUE(IsTraceparent(kTrace));
  for (const char* wrong : {"", "00", "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
                            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-011",
                            "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}) {
    EXPECT_FALSE(IsTraceparent(wrong)) << wrong;
  }
}

class AccessLogTest : public RouterFixture {
 protected:
  AccessLogTest() {
    context_.access_log = [this](const std::string& line) {
      MutexLock lock(mutex_);
      lines_.push_back(line);
    };
  }
  ~AccessLogTest() override { StopRouter(); }

  // The lines so far, once there are so many.
  std::vector<std::string> AwaitLines(std::size_t count) {
    while (true) {
      {
        MutexLock lock(mutex_);
        if (lines_.size() >= count) return lines_;
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  // Sends `request` with a traceparent, and answers it.
  std::string AskWithTrace(const std::string& traceparent) {
    grpc::ClientContext context;
    context.AddMetadata("traceparent", traceparent);
    v1::GenerateRequest request = TextRequest("a secret");
    request.set_request_id("mine");
    const auto reader = stub_->Generate(&context, request);
    const auto call = worker().TakeCall();
    std::string seen = call->request().traceparent();
    call->Send({'h', 'i'}, v1::FINISH_REASON_LENGTH);
    call->End();
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
    return seen;
  }

  Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(AccessLogTest, TellsWhoAskedWhereItWentAndHowItEndedButNotWhatWasSaid) {
  StartOne();
  EXPECT_EQ(AskWithTrace(kTrace), kTrace);
  const std::string line = AwaitLines(1)[0];
  const nlohmann::json json = nlohmann::json::parse(line);
  EXPECT_EQ(json["request_id"], "mine");
  EXPECT_EQ(json["traceparent"], kTrace);
  EXPECT_EQ(json["status"], "OK");
  EXPECT_EQ(json["reason"], "length");
  EXPECT_EQ(json["prompt_tokens"], 8);
  EXPECT_EQ(json["completion_tokens"], 2);
  EXPECT_EQ(json["group"], worker_addresses_[0]);
  EXPECT_EQ(json["placements"], 1);
  EXPECT_GE(json["seconds"], json["first_token_seconds"]);
  EXPECT_EQ(line.find("secret"), line.npos);
  EXPECT_EQ(line.find('\n'), line.npos);
}

TEST_F(AccessLogTest, ATraceparentThatIsNoneIsNotPassedOn) {
  StartOne();
  EXPECT_EQ(AskWithTrace("garbage"), "");
  EXPECT_FALSE(nlohmann::json::parse(AwaitLines(1)[0]).contains("traceparent"));
}

TEST_F(AccessLogTest, RefusedAndCancelledCallsHaveTheirLine) {
  StartOne();
  v1::GenerateRequest wrong = TextRequest("x");
  wrong.mutable_sampling()->set_top_p(7);
  Send(wrong)->Wait();
  const nlohmann::json refused = nlohmann::json::parse(AwaitLines(1)[0]);
  EXPECT_EQ(refused["status"], "INVALID_ARGUMENT");
  EXPECT_EQ(refused["placements"], 0);
  const auto stream = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  stream->Cancel();
  stream->Wait();
  EXPECT_EQ(nlohmann::json::parse(AwaitLines(2)[1])["status"], "CANCELLED");
  call->WaitUntilCancelled();
  call->End();
}

}  // namespace
}  // namespace weft
