// A request whose group is lost goes on elsewhere: the client's stream is that of an undisturbed
// run.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/error_reason.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

std::int32_t Id(char c) { return static_cast<unsigned char>(c); }

class ReplayTest : public RouterFixture {
 protected:
  static std::string Resumed(const FakeWorker::Call& call) {
    return {call.request().resume_token_ids().begin(), call.request().resume_token_ids().end()};
  }

  std::shared_ptr<FakeWorker::Call> TakeAnyCall() {
    while (true) {
      for (const auto& worker : workers_) {
        if (worker->num_calls_waiting() > 0) return worker->TakeCall();
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  // Sends what `call` has to add for an output of `whole`, which then ends.
  static void SendRest(FakeWorker::Call& call, std::string_view whole) {
    const std::string resumed = Resumed(call);
    ASSERT_THAT(std::string(whole), StartsWith(resumed));
    for (const char c : whole.substr(resumed.size(), whole.size() - resumed.size() - 1)) {
      call.Send({Id(c)});
    }
    call.Send({Id(whole.back())}, v1::FINISH_REASON_LENGTH);
    call.End();
  }

  // The client has so many, and so the router.
  static void AwaitTokens(const Stream& stream, std::size_t count) {
    while (stream.num_token_ids() < static_cast<int>(count)) absl::SleepFor(absl::Milliseconds(1));
  }

  static void ExpectUndisturbed(Stream& stream, std::string_view whole, std::int32_t index = 0) {
    ASSERT_TRUE(stream.Wait().ok()) << stream.Wait();
    EXPECT_EQ(stream.Text(index), whole);
    std::vector<std::int32_t> ids;
    for (const char c : whole) ids.push_back(Id(c));
    EXPECT_EQ(stream.TokenIds(index), ids);
    EXPECT_EQ(stream.Last(index).usage().completion_tokens(), static_cast<int>(whole.size()));
    EXPECT_EQ(stream.Last(index).finish_reason(), v1::FINISH_REASON_LENGTH);
    for (std::size_t i = 0; i < stream.responses().size(); ++i) {
      EXPECT_EQ(stream.responses()[i].seq(), i);
      EXPECT_EQ(stream.responses()[i].prompt_token_ids().empty(), i > 0);
    }
  }
};

TEST_F(ReplayTest, ALostStreamGoesOnAtAnotherGroupFromEveryToken) {
  constexpr std::string_view kWhole = "h\xc3\xa9llo!";
  StartSeveral(2);
  for (std::size_t cut = 0; cut < kWhole.size(); ++cut) {
    SCOPED_TRACE(cut);
    for (std::size_t i = 0; i < 2; ++i) WaitUntilReady(i);
    v1::GenerateRequest request = TextRequest("xy");
    request.mutable_sampling()->set_temperature(1);  // the router draws the seed
    const auto stream = Send(request);
    while (worker(0).num_calls_waiting() + worker(1).num_calls_waiting() == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    const std::size_t first = worker(0).num_calls_waiting() > 0 ? 0 : 1;
    const auto call = worker(first).TakeCall();
    for (const char c : kWhole.substr(0, cut)) call->Send({Id(c)});
    AwaitTokens(*stream, cut);
    worker(first).Kill();
    const auto next = worker(1 - first).TakeCall();
    EXPECT_EQ(Resumed(*next), kWhole.substr(0, cut));
    EXPECT_GT(next->request().attempt(), call->request().attempt());
    EXPECT_EQ(next->request().request_id(), call->request().request_id());
    EXPECT_EQ(next->request().sampling().SerializeAsString(),
              call->request().sampling().SerializeAsString());
    EXPECT_THAT(next->request().prompt_token_ids(), ElementsAre('x', 'y'));
    SendRest(*next, kWhole);
    ExpectUndisturbed(*stream, kWhole);
    worker(first).Start();
  }
}

TEST_F(ReplayTest, ALostStreamWaitsForItsGroupToComeBack) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  worker().TakeCall()->Send({'a'});
  AwaitTokens(*stream, 1);
  worker().Kill();
  WaitUntilReady(0, false);
  worker().Start();
  SendRest(*worker().TakeCall(), "abc");
  ExpectUndisturbed(*stream, "abc");
}

TEST_F(ReplayTest, AStopStringThatTheLossSplitsIsFound) {
  StartSeveral(2);
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->add_stop("bcd");
  const auto stream = Send(request);
  const auto call = worker(0).TakeCall();
  for (const char c : std::string_view("abc")) call->Send({Id(c)});
  AwaitTokens(*stream, 3);
  worker(0).Kill();
  const auto next = worker(1).TakeCall();
  EXPECT_EQ(Resumed(*next), "abc");
  for (const char c : std::string_view("abcd").substr(Resumed(*next).size())) next->Send({Id(c)});
  next->WaitUntilCancelled();  // the leader is told
  next->End();
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "a");
  EXPECT_EQ(stream->Last().finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(stream->Last().stop(), "bcd");
  EXPECT_EQ(stream->Last().usage().completion_tokens(), 4);
}

TEST_F(ReplayTest, LogprobsOfThePromptComeOnceWhereverTheGroupIsLost) {
  for (const bool after_first_token : {false, true}) {
    SCOPED_TRACE(after_first_token);
    workers_.clear();
    worker_addresses_.clear();
    StartSeveral(2);
    v1::GenerateRequest request = TextRequest("xyz");
    request.mutable_sampling()->set_prompt_logprobs(0);
    const auto stream = Send(request);
    const auto call = worker(0).TakeCall();
    v1::WorkerGenerateResponse chunk;
    for (int i = 0; i < 2; ++i) chunk.add_prompt_logprobs();
    call->Send(chunk);
    if (after_first_token) {
      call->Send({'a'});
      AwaitTokens(*stream, 1);
    }
    worker(0).Kill();
    const auto next = worker(1).TakeCall();
    // With a token the client has them.
    EXPECT_EQ(Resumed(*next), after_first_token ? "a" : "");
    EXPECT_EQ(next->request().sampling().has_prompt_logprobs(), !after_first_token);
    if (Resumed(*next).empty()) {
      chunk.add_prompt_logprobs();
      next->Send(chunk);
    }
    SendRest(*next, "ab");
    ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
    int positions = 0;
    for (const auto& response : stream->responses()) positions += response.prompt_logprobs_size();
    EXPECT_EQ(positions, Resumed(*next).empty() ? 3 : 2);
    StopRouter();
  }
}

TEST_F(ReplayTest, EachSampleGoesOnByItself) {
  StartSeveral(2);
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->set_n(2);
  const auto stream = Send(request);
  const auto first = worker(0).TakeCall();
  const auto second = worker(1).TakeCall();
  const auto whole = [](const FakeWorker::Call& call) {
    return call.request().request_id().starts_with("0:") ? "zero" : "one!";
  };
  second->Send({whole(*second)[0]});
  first->Send({whole(*first)[0]});
  AwaitTokens(*stream, 2);
  worker(0).Kill();
  SendRest(*worker(1).TakeCall(), whole(*first));
  for (const char c : std::string_view(whole(*second)).substr(1, 2)) second->Send({Id(c)});
  second->Send({whole(*second)[3]}, v1::FINISH_REASON_LENGTH);
  second->End();
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(0), "zero");
  EXPECT_EQ(stream->Text(1), "one!");
}

TEST_F(ReplayTest, ARequestThatKillsItsGroupsFailsAfterMaxReplays) {
  context_.max_replays = 2;
  StartOne();
  const auto stream = Send(TextRequest("x"));
  for (int i = 0; i < 3; ++i) {
    const auto call = worker().TakeCall();
    EXPECT_EQ(worker().num_calls_waiting(), 0);
    call->End(WithReason(absl::UnavailableError("rank 1 died"), kReasonRankLost));
  }
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonRankLost) << stream->Wait();
}

TEST_F(ReplayTest, ADrainThatEndsAStreamCostsNoAttempt) {
  context_.max_attempts = 1;
  context_.max_replays = 0;
  StartSeveral(2);
  const std::string whole = "abcdefgh";
  const auto stream = Send(TextRequest("x"));
  for (std::size_t i = 0; i + 1 < whole.size(); ++i) {
    const auto call = TakeAnyCall();
    EXPECT_EQ(Resumed(*call), whole.substr(0, i));
    call->Send({Id(whole[i])});
    AwaitTokens(*stream, i + 1);
    call->End(WithReason(absl::UnavailableError("drain timeout"), kReasonDraining));
  }
  SendRest(*TakeAnyCall(), whole);
  ExpectUndisturbed(*stream, whole);
}

TEST_F(ReplayTest, ALostStreamWaitsForAGroupThatItFits) {
  StartSeveral(2);
  v1::GroupState small = FakeWorker::ReadyState();
  small.mutable_group()->set_max_model_len(4);
  worker(1).SetState(small);
  while (cluster_->Snapshot()->groups[1]->info.max_model_len() != 4) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  const auto stream = Send(TextRequest("x"));
  const auto call = worker(0).TakeCall();
  for (const char c : std::string_view("abcd")) call->Send({Id(c)});
  AwaitTokens(*stream, 4);
  worker(0).Kill();
  WaitUntilReady(0, false);
  while (cluster_->num_waiting() == 0) absl::SleepFor(absl::Milliseconds(1));
  worker(0).Start();
  SendRest(*worker(0).TakeCall(), "abcdefgh");
  ExpectUndisturbed(*stream, "abcdefgh");
}

TEST_F(ReplayTest, ACancelDuringThePauseEndsTheRequest) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  worker().TakeCall()->Send({'a'});
  worker().Kill();
  while (cluster_->num_waiting() == 0) absl::SleepFor(absl::Milliseconds(1));
  stream->Cancel();
  EXPECT_TRUE(absl::IsCancelled(stream->Wait())) << stream->Wait();
  worker().Start();
  WaitUntilReady(0);
  EXPECT_EQ(worker().num_calls_waiting(), 0);
}

}  // namespace
}  // namespace weft
