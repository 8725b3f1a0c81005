// Groups that fail, hang, or have just come: how much they are given.
#include "router/breaker.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "router/policy.h"
#include "server/error_reason.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using std::chrono::milliseconds;

Breaker::Clock::time_point At(int ms) { return Breaker::Clock::time_point(milliseconds(ms)); }

TEST(BreakerTest, OpensAfterFailuresInARowAndClosesWithTheFirstThatIsServed) {
  Breaker breaker({.failures = 3, .open_time = milliseconds(100)});
  const auto end = [&breaker](GroupOutcome outcome, int ms) {
    return breaker.OnEnd(outcome, 7, At(ms));
  };
  end(GroupOutcome::kFailed, 0);
  end(GroupOutcome::kFailed, 0);
  end(GroupOutcome::kNone, 0);  // tells nothing
  EXPECT_FALSE(breaker.open());
  end(GroupOutcome::kServed, 0);
  end(GroupOutcome::kFailed, 0);
  end(GroupOutcome::kFailed, 0);
  EXPECT_TRUE(breaker.Allows(At(0)));
  end(GroupOutcome::kFailed, 10);
  EXPECT_TRUE(breaker.open());
  EXPECT_FALSE(breaker.Allows(At(109)));
  EXPECT_TRUE(breaker.Allows(At(110)));
  breaker.OnStart(At(110));  // the one that is let through
  EXPECT_FALSE(breaker.Allows(At(209)));
  end(GroupOutcome::kFailed, 150);
  EXPECT_FALSE(breaker.Allows(At(249)));
  EXPECT_TRUE(breaker.Allows(At(250)));
  EXPECT_TRUE(end(GroupOutcome::kServed, 251));
  EXPECT_FALSE(breaker.open());
}

TEST(BreakerTest, ALossIsOneFailureHoweverManyStreamsItEnds) {
  Breaker breaker({.failures = 2, .open_time = milliseconds(100)});
  for (int i = 0; i < 9; ++i) breaker.OnEnd(GroupOutcome::kLost, 1, At(0));
  EXPECT_FALSE(breaker.open());
  breaker.OnEnd(GroupOutcome::kLost, 2, At(0));
  EXPECT_TRUE(breaker.open());
}

TEST(BreakerTest, ZeroNeverOpens) {
  Breaker breaker({.failures = 0});
  for (int i = 0; i < 99; ++i) breaker.OnEnd(GroupOutcome::kFailed, 1, At(0));
  EXPECT_FALSE(breaker.open());
}

TEST(PolicyWeightTest, AGroupOfATenthOfTheWeightHasATenthOfTheTurns) {
  for (const RoutingPolicy kind : {RoutingPolicy::kRoundRobin, RoutingPolicy::kRandom,
                                   RoutingPolicy::kLeastLoaded, RoutingPolicy::kPrefixAware}) {
    Policy policy(kind, /*request_tokens=*/100, /*seed=*/7);
    std::vector<GroupLoad> groups(3, {.ready = true, .max_prompt_tokens = 100});
    groups[1].weight = 0.1;
    std::vector<int> picked(3);
    for (int i = 0; i < 2100; ++i) {
      const std::size_t at = *policy.Pick(groups, 10);
      ++picked[at];
      ++groups[at].requests;
    }
    EXPECT_NEAR(picked[1], 100, 40) << static_cast<int>(kind);
    EXPECT_NEAR(picked[0], 1000, 150) << static_cast<int>(kind);
  }
}

class FailingGroupTest : public RouterFixture {
 protected:
  static void Await(const std::function<bool()>& condition) {
    while (!condition()) absl::SleepFor(absl::Milliseconds(1));  // ctest's timeout ends it
  }
  // Sends requests one after the other until the first worker has had `count`, each of which fails;
  // the others are served.
  void FailFirst(int count) {
    for (int failed = 0; failed < count;) {
      const auto stream = Send(TextRequest("x"));
      Await([&] { return worker(0).num_calls_waiting() + worker(1).num_calls_waiting() > 0; });
      if (worker(0).num_calls_waiting() > 0) {
        worker(0).TakeCall()->End(absl::InternalError("broken"));
        ++failed;
      } else {
        Serve(1);
      }
      stream->Wait();
    }
  }
  void Serve(std::size_t group) {
    const auto call = worker(group).TakeCall();
    call->Send({'z'}, v1::FINISH_REASON_LENGTH);
    call->End();
  }
};

TEST_F(FailingGroupTest, AGroupWhoseStreamsFailIsAskedLast) {
  StartSeveral(2, {.link = {.breaker = {.failures = 3, .open_time = std::chrono::hours(1)}},
                   .policy = RoutingPolicy::kRoundRobin});
  FailFirst(3);
  for (int i = 0; i < 4; ++i) {
    const auto stream = Send(TextRequest("x"));
    Serve(1);
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
  // Better than none: and so it is closed again.
  worker(1).Kill();
  WaitUntilReady(1, false);
  const auto stream = Send(TextRequest("x"));
  Serve(0);
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(FailingGroupTest, AGroupThatIsFullIsNotAFailingOne) {
  StartSeveral(2, {.link = {.min_retry_backoff = milliseconds(1),
                            .max_retry_backoff = milliseconds(1),
                            .breaker = {.failures = 1, .open_time = std::chrono::hours(1)}},
                   .policy = RoutingPolicy::kRoundRobin});
  worker(0).RefuseCalls(WithReason(absl::ResourceExhaustedError("full"), kReasonOverloaded));
  while (worker(0).num_refused() == 0) {
    const auto stream = Send(TextRequest("x"));
    Serve(1);
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
  EXPECT_FALSE(cluster_->links()[0]->Load().breaker_open);
}

TEST_F(FailingGroupTest, ABrokenGroupIsTriedNowAndThen) {
  StartSeveral(2, {.link = {.breaker = {.failures = 1, .open_time = milliseconds(20)}},
                   .policy = RoutingPolicy::kRoundRobin});
  FailFirst(3);  // though it breaks with each of them
  std::vector<std::unique_ptr<Stream>> streams;
  while (cluster_->links()[0]->Load().breaker_open) {
    streams.push_back(Send(TextRequest("x")));
    Await([&] { return worker(0).num_calls_waiting() + worker(1).num_calls_waiting() > 0; });
    Serve(worker(0).num_calls_waiting() > 0 ? 0 : 1);
    streams.back()->Wait();
  }
}

TEST_F(FailingGroupTest, AGroupThatDoesNotAnswerIsLeftForAnother) {
  StartSeveral(2, {.link = {.first_token_timeout = milliseconds(50)}});
  const auto stream = Send(TextRequest("x"));
  const auto hung = worker(0).TakeCall();
  Serve(1);
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  hung->WaitUntilCancelled();
  hung->End();
}

TEST_F(FailingGroupTest, OneThatHasAnsweredIsNotLeft) {
  StartSeveral(2, {.link = {.first_token_timeout = milliseconds(50)}});
  const auto stream = Send(TextRequest("x"));
  const auto slow = worker(0).TakeCall();
  slow->Send({'a'});
  absl::SleepFor(absl::Milliseconds(300));
  slow->Send({'b'}, v1::FINISH_REASON_LENGTH);
  slow->End();
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "ab");
  EXPECT_EQ(worker(1).num_calls_waiting(), 0);
}

TEST_F(FailingGroupTest, TheOnlyOneIsWaitedFor) {
  StartSeveral(1, {.link = {.first_token_timeout = milliseconds(20)}});
  const auto stream = Send(TextRequest("x"));
  const auto slow = worker(0).TakeCall();
  absl::SleepFor(absl::Milliseconds(200));
  slow->Send({'b'}, v1::FINISH_REASON_LENGTH);
  slow->End();
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(worker(0).num_calls_waiting(), 0);
}

TEST_F(FailingGroupTest, OneHungGroupHoldsUpNobodyElse) {
  StartSeveral(2, {.link = {.heartbeat_timeout = milliseconds(300)}});
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(Send(TextRequest("x")));
  Await([&] { return worker(0).num_calls_waiting() + worker(1).num_calls_waiting() == 4; });
  EXPECT_EQ(worker(0).num_calls_waiting(), 2);
  worker(0).FallSilent();
  Serve(1);
  Serve(1);
  // Those of the hung group follow when it is found out.
  Serve(1);
  Serve(1);
  for (const auto& stream : streams) EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(FailingGroupTest, AGroupThatComesBackHasASmallShareAtFirst) {
  StartSeveral(
      2, {.link = {.slow_start = std::chrono::hours(10)}, .policy = RoutingPolicy::kRoundRobin});
  // Both have come just now: level.
  EXPECT_NEAR(cluster_->links()[0]->Load().weight, cluster_->links()[1]->Load().weight, 0.01);
  EXPECT_LT(cluster_->links()[0]->Load().weight, 0.11);
}

}  // namespace
}  // namespace weft
