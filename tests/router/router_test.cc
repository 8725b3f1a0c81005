// The router against scripted leaders, over real gRPC on abstract sockets.

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "server/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RouterTest : public RouterFixture {};

TEST_F(RouterTest, StreamsTokensTextAndUsageInOrder) {
  StartOne();
  const auto stream = Send(TextRequest("ab<end>"));
  const auto call = worker().TakeCall();
  EXPECT_THAT(call->request().prompt_token_ids(), ElementsAre('a', 'b', kEndToken));
  for (const char c : std::string_view("hello")) call->Send({c});
  call->Send({kEndToken}, v1::FINISH_REASON_STOP);
  call->End();

  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "hello");
  EXPECT_THAT(stream->TokenIds(), ElementsAre('h', 'e', 'l', 'l', 'o', kEndToken));
  const auto& responses = stream->responses();
  EXPECT_THAT(responses[0].prompt_token_ids(), ElementsAre('a', 'b', kEndToken));
  int tokens = 0;
  for (std::size_t i = 0; i < responses.size(); ++i) {
    tokens += responses[i].token_ids_size();
    EXPECT_EQ(responses[i].seq(), i);
    EXPECT_EQ("0:" + responses[i].request_id(), call->request().request_id());
    EXPECT_EQ(responses[i].usage().prompt_tokens(), 3);
    EXPECT_EQ(responses[i].usage().completion_tokens(), tokens);
    EXPECT_EQ(responses[i].prompt_token_ids().empty(), i > 0);
    EXPECT_EQ(responses[i].finish_reason() == v1::FINISH_REASON_STOP, i + 1 == responses.size());
  }
}

TEST_F(RouterTest, NeverSplitsACharacter) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  const std::string text = "aé€😀b";
  for (const std::int32_t id : ByteIds(text)) call->Send({id});
  call->Send({0xE2, 0x82}, v1::FINISH_REASON_LENGTH);  // the beginning of a euro sign
  call->End();
  ASSERT_TRUE(stream->Wait().ok());
  EXPECT_EQ(stream->Text(), text + "\uFFFD");
  for (const auto& response : stream->responses()) {
    // Whole characters only: the first byte is none that continues one, and all is valid.
    EXPECT_TRUE(tokenizer_->Encode(response.text(), false).ok()) << response.ShortDebugString();
  }
}

TEST_F(RouterTest, PassesSamplingOnAndDrawsWhatIsAbsent) {
  StartOne();
  v1::GenerateRequest request;
  request.set_request_id("mine");
  request.mutable_token_ids()->add_ids(7);
  request.mutable_sampling()->set_seed(0);
  request.mutable_sampling()->set_top_k(0);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->add_stop_token_ids(5);
  const auto given = Send(request);
  const auto given_call = worker().TakeCall();
  EXPECT_EQ(given_call->request().request_id(), "0:mine");
  EXPECT_THAT(given_call->request().prompt_token_ids(), ElementsAre(7));
  EXPECT_EQ(given_call->request().sampling().SerializeAsString(),
            request.sampling().SerializeAsString());

  std::vector<std::uint64_t> seeds;
  std::vector<std::string> ids;
  for (int i = 0; i < 2; ++i) {
    const auto drawn = Send(TextRequest("x"));
    const auto call = worker().TakeCall();
    EXPECT_TRUE(call->request().sampling().has_seed());
    EXPECT_FALSE(call->request().sampling().has_temperature());
    seeds.push_back(call->request().sampling().seed());
    ids.push_back(call->request().request_id());
    drawn->Cancel();
    call->WaitUntilCancelled();
  }
  EXPECT_NE(seeds[0], seeds[1]);
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_FALSE(ids[0].empty());
}

TEST_F(RouterTest, CancelReachesTheLeader) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  call->Send({'a'});
  stream->Cancel();
  EXPECT_TRUE(absl::IsCancelled(stream->Wait())) << stream->Wait();
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, DeadlineReachesTheLeader) {
  StartOne();
  Stream stream(*stub_, TextRequest("x"),
                std::chrono::system_clock::now() + std::chrono::seconds(2));
  const auto call = worker().TakeCall();
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream.Wait())) << stream.Wait();
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, LostGroupEndsItsStreamsAndIsFoundAgain) {
  context_.max_replays = 0;
  StartOne();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 3; ++i) {
    streams.push_back(Send(TextRequest("x")));
    worker().TakeCall()->Send({'a'});
  }
  worker().Kill();
  for (const auto& stream : streams) {
    EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
    EXPECT_EQ(ReasonOf(stream->Wait()), kReasonRankLost) << stream->Wait();
  }
  WaitUntilReady(0, false);
  const auto waiting = Send(TextRequest("y"));
  worker().Start();
  const auto call = worker().TakeCall();
  call->Send({'z'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(waiting->Wait().ok()) << waiting->Wait();
  EXPECT_EQ(waiting->Text(), "z");
}

TEST_F(RouterTest, SilentGroupIsLost) {
  context_.max_replays = 0;
  StartOne({.link = {.heartbeat_timeout = std::chrono::milliseconds(500)}});
  const auto stream = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  worker().FallSilent();
  EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonRankLost);
  EXPECT_THAT(std::string(stream->Wait().message()), HasSubstr("silent for 500 ms"));
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, LossOfOneGroupLeavesTheOthersAlone) {
  context_.max_replays = 0;
  StartSeveral(2);
  FakeWorker& a = worker(0);
  FakeWorker& b = worker(1);
  const auto on_a = Send(TextRequest("x"));
  const auto call_a = a.TakeCall();
  const auto on_b = Send(TextRequest("x"));
  const auto call_b = b.TakeCall();
  a.Kill();
  EXPECT_EQ(ReasonOf(on_a->Wait()), kReasonRankLost) << on_a->Wait();
  call_b->Send({'o'});
  call_b->Send({'k'}, v1::FINISH_REASON_LENGTH);
  call_b->End();
  EXPECT_TRUE(on_b->Wait().ok()) << on_b->Wait();
  EXPECT_EQ(on_b->Text(), "ok");
}

TEST_F(RouterTest, ARequestGoesWhereItsPrefixIsCached) {
  StartSeveral(3, {.link = {.watch_blocks = true}});
  const std::string prompt = "a prompt of some blocks";  // of 4 bytes each
  v1::GenerateRequest request;
  for (const char c : prompt) request.mutable_token_ids()->add_ids(c);
  request.set_cache_salt("mine");
  PromptBlocks hashed(request.token_ids().ids(), request.cache_salt());
  hashed.Hash("key", 4);
  for (std::size_t i = 0; i < 3; ++i) {
    v1::GroupState state = FakeWorker::ReadyState();
    state.mutable_group()->set_block_size(4);
    state.set_block_hash_key("key");
    v1::BlockChanges& changes = *state.mutable_block_changes();
    changes.set_snapshot(true);
    // The second has the longest part of it.
    for (const BlockHash& hash : hashed.Find("key").subspan(0, i == 1 ? 5 : i)) {
      changes.add_changes()->set_hash(std::string(hash.begin(), hash.end()));
    }
    worker(i).SetState(state);
  }
  while (cluster_->links()[1]->IndexSize().first != 5 ||
         cluster_->links()[2]->IndexSize().first != 2) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  for (const bool mine : {true, false}) {
    if (!mine) request.set_cache_salt("");
    const auto stream = Send(request);
    const auto call = worker(mine ? 1 : 0).TakeCall();
    EXPECT_EQ(call->request().cache_salt(), request.cache_salt());
    call->Send({'b'}, v1::FINISH_REASON_LENGTH);
    call->End();
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
  EXPECT_EQ(cluster_->placed().prompt_tokens, 2 * prompt.size());
  EXPECT_EQ(cluster_->placed().cached_tokens, 5 * 4U);
}

TEST_F(RouterTest, RequestRefusedByADrainingGroupGoesToAnotherOne) {
  StartSeveral(2);
  FakeWorker& b = worker(1);
  worker(0).RefuseCalls(WithReason(absl::UnavailableError("stopping"), kReasonDraining));
  for (int i = 0; i < 3; ++i) {
    const auto stream = Send(TextRequest("x"));
    const auto call = b.TakeCall();
    call->Send({'b'}, v1::FINISH_REASON_LENGTH);
    call->End();
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
}

TEST_F(RouterTest, ARefusedRequestIsPlacedUpToMaxAttempts) {
  context_.max_attempts = 2;
  StartOne();
  worker().RefuseCalls(WithReason(absl::UnavailableError("stopping"), kReasonDraining));
  const auto stream = Send(TextRequest("x"));
  EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonDraining);
  EXPECT_EQ(worker().num_refused(), 2);
}

TEST_F(RouterTest, ASlowReaderLosesItsOwnStreamOnly) {
  context_.max_stream_buffer_bytes = 1 << 16;
  StartOne();
  grpc::ClientContext slow_context;
  const auto slow = stub_->Generate(&slow_context, TextRequest("x"));  // and reads nothing
  const auto slow_call = worker().TakeCall();
  const auto other = Send(TextRequest("x"));
  const auto other_call = worker().TakeCall();
  other_call->Send({'a'});
  const std::vector<std::int32_t> many(4096, 'a');
  while (slow_call->Send(many)) absl::SleepFor(absl::Milliseconds(1));
  other_call->Send({'b'}, v1::FINISH_REASON_LENGTH);
  other_call->End();
  EXPECT_TRUE(other->Wait().ok()) << other->Wait();
  EXPECT_EQ(other->Text(), "ab");

  v1::GenerateResponse response;
  std::uint64_t seq = 0;
  while (slow->Read(&response)) EXPECT_EQ(response.seq(), seq++);
  const absl::Status status = FromGrpcStatus(slow->Finish());
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(ReasonOf(status), kReasonSlowReader);
}

TEST_F(RouterTest, RequestsWaitForAGroupUpToTheQueueTimeout) {
  StartRouter({UniqueAddress("nobody")}, {.queue_timeout = std::chrono::milliseconds(200)});
  const auto stream = Send(TextRequest("x"));
  EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonNotReady);
}

TEST_F(RouterTest, AGroupThatIsNotReadyGetsNothing) {
  const std::string address = UniqueAddress("leader");
  v1::GroupState loading;
  loading.mutable_group()->set_state("loading");
  FakeWorker leader(address, loading);
  StartRouter({address});
  while (cluster_->Snapshot()->groups[0]->state != "loading") {
    absl::SleepFor(absl::Milliseconds(5));
  }
  const auto stream = Send(TextRequest("x"));
  leader.SetState(FakeWorker::ReadyState());
  const auto call = leader.TakeCall();
  EXPECT_TRUE(cluster_->Snapshot()->groups[0]->ready);
  call->Send({'a'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
}

TEST_F(RouterTest, TheQueueForAGroupIsBounded) {
  StartRouter({UniqueAddress("nobody")}, {.max_waiting = 1});
  const auto first = Send(TextRequest("x"));
  const auto second = Send(TextRequest("x"));
  // Whichever came second is refused; the other one waits until it is cancelled.
  while (!first->ended() && !second->ended()) absl::SleepFor(absl::Milliseconds(5));
  Stream& refused = first->ended() ? *first : *second;
  Stream& waiting = first->ended() ? *second : *first;
  EXPECT_TRUE(absl::IsResourceExhausted(refused.Wait())) << refused.Wait();
  EXPECT_EQ(ReasonOf(refused.Wait()), kReasonOverloaded);
  EXPECT_FALSE(waiting.ended());
  waiting.Cancel();
  EXPECT_TRUE(absl::IsCancelled(waiting.Wait())) << waiting.Wait();
}

TEST_F(RouterTest, RequestsSpreadOverEqualGroups) {
  StartSeveral(2);
  FakeWorker& a = worker(0);
  FakeWorker& b = worker(1);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 6; ++i) streams.push_back(Send(TextRequest("x")));
  while (a.num_calls_waiting() + b.num_calls_waiting() < 6) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(a.num_calls_waiting(), 3);
  EXPECT_EQ(b.num_calls_waiting(), 3);
}

TEST_F(RouterTest, BadRequestsAreRefusedAndOthersUnharmed) {
  StartOne();
  const auto good = Send(TextRequest("x"));
  const auto call = worker().TakeCall();

  v1::GenerateRequest too_long = TextRequest(std::string(64, 'x'));
  v1::GenerateRequest bad_token;
  bad_token.mutable_token_ids()->add_ids(300);
  v1::GenerateRequest bad_stop = TextRequest("x");
  bad_stop.mutable_sampling()->add_stop_token_ids(-1);
  v1::GenerateRequest bad_sampling = TextRequest("x");
  bad_sampling.mutable_sampling()->set_top_p(2);
  const std::vector<std::pair<v1::GenerateRequest, std::string>> cases = {
      {too_long, "64 tokens; at most 63"},
      {bad_token, "prompt_token_ids[0] is 300; ids from 0 to 299"},
      {bad_stop, "stop_token_ids[0] is -1"},
      {bad_sampling, "top_p is 2"},
      {v1::GenerateRequest(), "no prompt"}};
  for (const auto& [request, message] : cases) {
    const auto stream = Send(request);
    EXPECT_TRUE(absl::IsInvalidArgument(stream->Wait())) << stream->Wait();
    EXPECT_THAT(std::string(stream->Wait().message()), HasSubstr(message));
  }
  call->Send({'a'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(good->Wait().ok()) << good->Wait();

  const auto longest = Send(TextRequest(std::string(63, 'x')));
  EXPECT_EQ(worker().TakeCall()->request().prompt_token_ids_size(), 63);
}

TEST_F(RouterTest, ARequestThatIsNotUtf8IsAnInvalidArgument) {
  StartRouter({UniqueAddress("nobody")});
  grpc::GenericStub stub(channel_);
  const std::string bytes = "\x1a\x02\xff\xfe";  // field 3, text
  grpc::Slice slice(bytes);
  grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, "/weft.v1.Inference/Generate", request, &queue);
  grpc::Status status;
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("UTF-8"));
}

TEST_F(RouterTest, ALeaderThatStopsWithoutAReasonIsAnError) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  call->Send({'a'});
  call->End();
  EXPECT_TRUE(absl::IsInternal(stream->Wait())) << stream->Wait();
}

TEST_F(RouterTest, WhatTheLeaderRefusesArrivesAsItSaidIt) {
  StartOne();
  const auto stream = Send(TextRequest("x"));
  worker().TakeCall()->End(
      WithReason(absl::InvalidArgumentError("too many stop tokens"), kReasonOutOfLimits));
  EXPECT_TRUE(absl::IsInvalidArgument(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonOutOfLimits);
  EXPECT_EQ(stream->Wait().message(), "too many stop tokens");
}

TEST_F(RouterTest, ServerInfoListsEveryGroup) {
  const std::string address = UniqueAddress("leader");
  const std::string nobody = UniqueAddress("nobody");
  FakeWorker leader(address);
  StartRouter({address, nobody});
  WaitUntilReady(0);
  while (cluster_->Snapshot()->groups[1]->state == "connecting") {
    absl::SleepFor(absl::Milliseconds(5));
  }
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_FALSE(info.version().empty());
  ASSERT_EQ(info.groups_size(), 2);
  EXPECT_EQ(info.groups(0).address(), address);
  EXPECT_TRUE(info.groups(0).ready());
  EXPECT_EQ(info.groups(0).tensor_parallel_size(), 2);
  EXPECT_EQ(info.groups(1).address(), nobody);
  EXPECT_FALSE(info.groups(1).ready());
  EXPECT_THAT(info.groups(1).state(), HasSubstr("unreachable: "));
}

}  // namespace
}  // namespace weft
