// Groups that have as many requests as they take: who goes elsewhere, who waits, who is refused.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/error_reason.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Status Full() {
  return WithReason(absl::ResourceExhaustedError("2 requests wait"), kReasonOverloaded);
}

class OverloadTest : public RouterFixture {
 protected:
  // Groups that run `max_num_seqs` and let `max_num_waiting` wait.
  void SetSize(std::size_t group, int max_num_seqs, int max_num_waiting) {
    v1::GroupState state = FakeWorker::ReadyState();
    state.mutable_group()->set_max_num_seqs(max_num_seqs);
    state.mutable_group()->set_max_num_waiting(max_num_waiting);
    worker(group).SetState(state);
    Await([&] { return cluster_->Snapshot()->groups[group]->info.max_num_seqs() == max_num_seqs; });
  }
  static void Await(const std::function<bool()>& condition) {
    while (!condition()) absl::SleepFor(absl::Milliseconds(1));  // ctest's timeout ends it
  }
  void AwaitWaiting(std::int64_t count) {
    Await([&] { return cluster_->num_waiting() == count; });
  }
  std::unique_ptr<Stream> SendText(std::string_view text, std::int32_t priority = 0) {
    v1::GenerateRequest request = TextRequest(text);
    request.set_priority(priority);
    return Send(request);
  }
  static std::string Prompt(const FakeWorker::Call& call) {
    return {call.request().prompt_token_ids().begin(), call.request().prompt_token_ids().end()};
  }
  static void End(FakeWorker::Call& call) {
    call.Send({'z'}, v1::FINISH_REASON_LENGTH);
    call.End();
  }
};

TEST_F(OverloadTest, ARequestThatOneGroupRefusesGoesToAnotherAtOnce) {
  StartSeveral(3);
  worker(0).RefuseCalls(Full());
  worker(1).RefuseCalls(Full());
  const auto stream = SendText("x");
  End(*worker(2).TakeCall());
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(worker(0).num_refused() + worker(1).num_refused(), 2);
  // Those are known to be full now.
  const auto next = SendText("x");
  End(*worker(2).TakeCall());
  EXPECT_TRUE(next->Wait().ok()) << next->Wait();
}

TEST_F(OverloadTest, WhenAllAreFullARequestWaitsForOneThatEnds) {
  StartOne({.link = {.min_retry_backoff = std::chrono::hours(1),
                     .max_retry_backoff = std::chrono::hours(1)}});
  const auto first = SendText("x");
  const auto running = worker().TakeCall();
  worker().RefuseCalls(Full());
  const auto second = SendText("y");
  AwaitWaiting(1);
  const auto third = SendText("z");  // is not even tried
  AwaitWaiting(2);
  EXPECT_EQ(worker().num_refused(), 1);
  worker().RefuseCalls(absl::OkStatus());
  EXPECT_EQ(worker().num_calls_waiting(), 0);
  End(*running);
  const auto next = worker().TakeCall();
  EXPECT_EQ(Prompt(*next), "y");
  EXPECT_EQ(cluster_->num_waiting(), 1);
  End(*next);
  End(*worker().TakeCall());
  for (Stream* stream : {first.get(), second.get(), third.get()}) {
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
}

TEST_F(OverloadTest, AFullGroupIsTriedAgainAfterABackoff) {
  StartOne({.link = {.min_retry_backoff = milliseconds(1), .max_retry_backoff = milliseconds(4)}});
  worker().RefuseCalls(Full());
  const auto stream = SendText("x");
  Await([&] { return worker().num_refused() >= 3; });
  worker().RefuseCalls(absl::OkStatus());
  End(*worker().TakeCall());
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(OverloadTest, WhoWaitsTooLongIsRefusedAndToldToRetry) {
  StartOne({.link = {.min_retry_backoff = milliseconds(1), .max_retry_backoff = milliseconds(1)},
            .queue_timeout = milliseconds(200)});
  worker().RefuseCalls(Full());
  const auto stream = SendText("x");
  EXPECT_TRUE(absl::IsResourceExhausted(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonOverloaded);
  EXPECT_GT(RetryAfterOf(stream->Wait()).value_or(absl::ZeroDuration()), absl::ZeroDuration());
  EXPECT_THAT(std::string(stream->Wait().message()), HasSubstr("within 200 ms: all are full"));
  EXPECT_GE(worker().num_refused(), 2);
}

TEST_F(OverloadTest, RetriesStayWithinTheirBudget) {
  StartOne({.link = {.min_retry_backoff = milliseconds(1), .max_retry_backoff = milliseconds(1)},
            .queue_timeout = milliseconds(700),
            .retry_budget = {.ratio = 0.5, .min_retries = 1}});
  worker().RefuseCalls(Full());
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(SendText("x"));
  for (const auto& stream : streams) {
    EXPECT_EQ(ReasonOf(stream->Wait()), kReasonOverloaded) << stream->Wait();
  }
  EXPECT_LE(worker().num_refused(), 8 + 4 + 1);
  EXPECT_GE(worker().num_refused(), 1 + 1);
}

TEST_F(OverloadTest, AGroupIsGivenNoMoreThanItRunsAndLetsWait) {
  StartOne({.link = {.max_waiting = 1}});
  SetSize(0, 2, 5);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(SendText("x"));
  AwaitWaiting(1);
  Await([&] { return worker().num_calls_waiting() == 3; });  // placed, and on their way
  SetSize(0, 3, 0);
  AwaitWaiting(1);
  EXPECT_EQ(worker().num_calls_waiting(), 3);
  for (int i = 0; i < 4; ++i) End(*worker().TakeCall());
  for (const auto& stream : streams) EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(OverloadTest, ThoseThatWaitGoByPriorityThenArrival) {
  StartOne();
  SetSize(0, 1, 0);
  std::vector<std::unique_ptr<Stream>> streams;
  streams.push_back(SendText("first"));
  const auto running = worker().TakeCall();
  for (const auto& [text, priority] :
       {std::pair("b", 1), std::pair("c", 1), std::pair("a", 0), std::pair("d", 2)}) {
    streams.push_back(SendText(text, priority));
    AwaitWaiting(static_cast<std::int64_t>(streams.size()) - 1);
  }
  End(*running);
  std::string order;
  for (int i = 0; i < 4; ++i) {
    const auto call = worker().TakeCall();
    order += Prompt(*call);
    End(*call);
  }
  EXPECT_EQ(order, "abcd");
  for (const auto& stream : streams) EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(OverloadTest, AFullQueueRefusesTheLast) {
  StartOne({.max_waiting = 1});
  SetSize(0, 1, 0);
  const auto running = SendText("x");
  const auto call = worker().TakeCall();
  const auto waiting = SendText("y", 1);
  AwaitWaiting(1);
  const auto refused = SendText("z", 1);
  EXPECT_EQ(ReasonOf(refused->Wait()), kReasonOverloaded) << refused->Wait();
  const auto urgent = SendText("u", 0);
  EXPECT_EQ(ReasonOf(waiting->Wait()), kReasonOverloaded) << waiting->Wait();
  EXPECT_THAT(std::string(waiting->Wait().message()), HasSubstr("1 requests wait already"));
  End(*call);
  const auto next = worker().TakeCall();
  EXPECT_EQ(Prompt(*next), "u");
  End(*next);
  EXPECT_TRUE(urgent->Wait().ok() && running->Wait().ok());
}

TEST_F(OverloadTest, APromptThatOnlyAFullGroupFitsHoldsUpNobody) {
  StartSeveral(2);
  SetSize(0, 1, 0);
  v1::GroupState small = FakeWorker::ReadyState();
  small.mutable_group()->set_max_model_len(4);
  worker(1).SetState(small);
  Await([&] { return cluster_->Snapshot()->groups[1]->info.max_model_len() == 4; });
  const auto running = SendText("longer");
  const auto call = worker(0).TakeCall();
  const auto waiting = SendText("longer");
  AwaitWaiting(1);
  const auto quick = SendText("x");
  End(*worker(1).TakeCall());
  EXPECT_TRUE(quick->Wait().ok()) << quick->Wait();
  EXPECT_EQ(cluster_->num_waiting(), 1);
  End(*call);
  End(*worker(0).TakeCall());
  EXPECT_TRUE(running->Wait().ok() && waiting->Wait().ok());
}

// Clocks of the test's own, and groups that answer when it says so.
TEST_F(OverloadTest, ADeadlineThatCannotBeMetIsRefusedEarly) {
  StartOne();
  SetSize(0, 1, 1000);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 40; ++i) streams.push_back(SendText("x"));
  Await([&] { return worker().num_calls_waiting() == 40; });
  for (int i = 0; i < 20; ++i) {  // about ten a second
    End(*worker().TakeCall());
    absl::SleepFor(absl::Milliseconds(100));
  }
  const auto late = std::make_unique<Stream>(*stub_, TextRequest("x"),
                                             std::chrono::system_clock::now() + milliseconds(500));
  EXPECT_EQ(ReasonOf(late->Wait()), kReasonOverloaded) << late->Wait();
  EXPECT_THAT(std::string(late->Wait().message()), HasSubstr("cannot be met"));
  EXPECT_GT(RetryAfterOf(late->Wait()).value_or(absl::ZeroDuration()), absl::Milliseconds(100));
  const auto in_time = std::make_unique<Stream>(
      *stub_, TextRequest("x"), std::chrono::system_clock::now() + std::chrono::minutes(5));
  Await([&] { return worker().num_calls_waiting() == 21; });
  while (worker().num_calls_waiting() > 0) End(*worker().TakeCall());
  EXPECT_TRUE(in_time->Wait().ok()) << in_time->Wait();
  for (const auto& stream : streams) EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

}  // namespace
}  // namespace weft
