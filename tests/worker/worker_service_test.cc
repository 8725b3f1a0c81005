// The leader's gRPC service over real connections, in front of a whole group in this process.

#include "worker/worker_service.h"

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/grpc_server.h"
#include "tests/golden.h"
#include "tests/worker/engine/block_index.h"
#include "tests/worker/generate_client.h"
#include "tests/worker/local_group.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using Call = GenerateClient;
using Response = v1::WorkerGenerateResponse;

constexpr std::int32_t kVocab = 320;
constexpr std::int32_t kEos = 2;

class WorkerServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
    LocalGroupOptions options;
    options.model.model_dir = dir;
    options.model.layout = {
        .tensor_parallel_size = 2, .decode_context_parallel_size = 2, .block_size = 16};
    options.model.num_blocks = 200;
    options.model.max_model_len = 500;
    options.rank.stall_timeout = absl::Seconds(20);
    auto group = LocalGroup::Start(options);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    service_ = std::make_unique<WorkerService>(joins_, 1, WorkerLimits{.max_logprobs = -1},
                                               [](std::int32_t, const absl::Status&) {});
    grpc::Service* services[] = {service_.get()};
    auto server = GrpcServer::Start({.listen_addresses = {"127.0.0.1:0"}}, services);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Worker::NewStub(NewGrpcChannel(server_->addresses()[0]));
    v1::GroupState state;
    state.set_vocab_size(kVocab);
    state.add_eos_token_ids(kEos);
    state.set_block_hash_key("of this model");
    service_->SetReady(group_->leader(), state);
  }
  void TearDown() override {
    if (server_ != nullptr) server_->Shutdown(absl::ZeroDuration());
    if (service_ != nullptr) service_->Stop();
    server_.reset();
  }

  static v1::WorkerGenerateRequest Request(const std::string& id, std::uint64_t attempt,
                                           std::int32_t max_tokens) {
    v1::WorkerGenerateRequest request;
    request.set_request_id(id);
    request.set_attempt(attempt);
    for (int i = 0; i < 5; ++i) request.add_prompt_token_ids(10 + i);
    request.mutable_sampling()->set_seed(1);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_ignore_eos(true);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    return request;
  }
  // Its connection buffers little for a call that does not read.
  std::unique_ptr<v1::Worker::Stub> SlowStub() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 14);
    return v1::Worker::NewStub(grpc::CreateCustomChannel(
        server_->addresses()[0], grpc::InsecureChannelCredentials(), arguments));
  }
  // True when `condition` holds within 20 s.
  template <typename Condition>
  static bool Await(const Condition& condition) {
    for (int i = 0; i < 4000; ++i) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  JoinTable joins_{1};
  std::unique_ptr<LocalGroup> group_;
  std::unique_ptr<WorkerService> service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::Worker::Stub> stub_;
};

TEST_F(WorkerServiceTest, LogprobsAndTheWayItEndedReachTheClient) {
  v1::WorkerGenerateRequest request = Request("a", 0, 20);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_ignore_eos(false);
  sampling.set_logprobs(3);
  sampling.set_prompt_logprobs(2);
  sampling.set_min_tokens(4);
  (*sampling.mutable_logit_bias())[kEos] = 100;
  grpc::Status status;
  const Response response = Call(*stub_, request).ReadAll(status);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.token_ids_size(), 5);  // min_tokens, then the end that the bias asks for
  EXPECT_EQ(response.token_ids(4), kEos);
  EXPECT_EQ(response.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_TRUE(response.ended_by_eos());
  ASSERT_EQ(response.logprobs_size(), 5);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(response.logprobs(i).token().token_id(), response.token_ids(i));
    EXPECT_EQ(response.logprobs(i).top_size(), 3);
  }
  ASSERT_EQ(response.prompt_logprobs_size(), 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(response.prompt_logprobs(i).token().token_id(), 11 + i);
    EXPECT_EQ(response.prompt_logprobs(i).top_size(), 2);
  }
}

// Two of three calls end in their own ways; what the third says is not touched by that.
TEST_F(WorkerServiceTest, CallsThatShareAStreamEndByThemselves) {
  grpc::ClientContext context;
  const auto stream = stub_->Generate(&context);
  const auto start = [&](std::uint64_t call, std::int32_t max_tokens, absl::Duration timeout) {
    v1::GenerateCommand command;
    command.set_call(call);
    *command.mutable_start() = Request(std::to_string(call), 0, max_tokens);
    command.set_timeout_us(absl::ToInt64Microseconds(timeout));
    return stream->Write(command);
  };
  ASSERT_TRUE(start(1, 490, absl::Hours(1)) && start(2, 490, absl::Milliseconds(1)) &&
              start(3, 20, absl::Hours(1)));
  std::map<std::uint64_t, Response> said;
  std::map<std::uint64_t, int> codes;
  v1::GenerateEvents events;
  bool cancelled = false;
  while ((codes.size() < 2 || !cancelled) && stream->Read(&events)) {
    for (const v1::GenerateEvent& event : events.events()) {
      EXPECT_FALSE(codes.contains(event.call())) << "something after the end of " << event.call();
      said[event.call()].MergeFrom(event.response());
      if (event.has_end()) codes[event.call()] = event.end().code();
    }
    if (cancelled || said[1].token_ids().empty()) continue;
    cancelled = true;
    v1::GenerateCommand cancel;
    cancel.set_call(1);
    cancel.set_cancel(true);
    ASSERT_TRUE(stream->Write(cancel));
  }
  EXPECT_TRUE(Await([&] { return group_->leader().num_requests() == 0; }));
  EXPECT_LT(said[1].token_ids_size(), 490);
  EXPECT_EQ(codes, (std::map<std::uint64_t, int>{{2, grpc::DEADLINE_EXCEEDED}, {3, grpc::OK}}));
  grpc::Status status;
  const Response undisturbed = Call(*stub_, Request("3", 0, 20)).ReadAll(status);
  EXPECT_EQ(undisturbed.token_ids_size(), 20);
  EXPECT_THAT(said[3].token_ids(), ::testing::ElementsAreArray(undisturbed.token_ids()));
  EXPECT_TRUE(Await([&] { return service_->calls().num_open_calls() == 0; }));
  context.TryCancel();
}

TEST_F(WorkerServiceTest, TheEndOfItsStreamEndsACall) {
  {
    Response response;
    Call call(*stub_, Request("a", 0, 490));
    ASSERT_TRUE(call.Read(response));
  }  // cancels the stream
  EXPECT_TRUE(Await([&] { return service_->calls().num_open_calls() == 0; }));
  EXPECT_TRUE(Await([&] { return group_->leader().num_requests() == 0; }));
}

TEST_F(WorkerServiceTest, WhatIsOutOfRangeIsInvalidArgument) {
  v1::WorkerGenerateRequest request = Request("a", 0, 20);
  request.mutable_sampling()->set_presence_penalty(2.5F);
  const grpc::Status status = Call(*stub_, request).Finish();
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "presence_penalty is 2.5; allowed is -2 to 2");
  EXPECT_TRUE(Await([&] { return service_->calls().num_open_calls() == 0; }));
}

TEST_F(WorkerServiceTest, AFirstTokenOutsideTheVocabularyIsRefused) {
  for (const std::int32_t token : {-1, kVocab, 1 << 30}) {
    grpc::ClientContext context;
    v1::ContinueKvRequest request;
    request.set_request_id("any");
    request.set_first_token(token);
    v1::ContinueKvResponse response;
    EXPECT_EQ(stub_->ContinueKv(&context, request, &response).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT)
        << token;
  }
}

TEST_F(WorkerServiceTest, ANewerAttemptEndsAnOlderOneThatStillRuns) {
  Response response;
  Call first(*stub_, Request("a", 1, 490));
  ASSERT_TRUE(first.Read(response));
  for (std::uint64_t attempt : {0, 1}) {
    const grpc::Status status = Call(*stub_, Request("a", attempt, 4)).Finish();
    EXPECT_EQ(status.error_code(), grpc::ALREADY_EXISTS);
    EXPECT_THAT(status.error_message(), HasSubstr("request a runs here as attempt 1"));
  }
  EXPECT_TRUE(Call(*stub_, Request("b", 0, 4)).Finish().ok());  // another request
  Call second(*stub_, Request("a", 2, 4));
  EXPECT_TRUE(second.Finish().ok());
  const grpc::Status ended = first.Finish();
  EXPECT_EQ(ended.error_code(), grpc::ABORTED);
  EXPECT_EQ(ended.error_message(), "attempt 2 has taken over");
  EXPECT_TRUE(Await([&] { return group_->leader().num_requests() == 0; }));
  // The id is free again, for any attempt: nothing is remembered.
  EXPECT_EQ(service_->calls().num_running_ids(), 0);
  EXPECT_TRUE(Call(*stub_, Request("a", 0, 4)).Finish().ok());
}

TEST_F(WorkerServiceTest, AnIdIsFreeAsSoonAsItsEndIsSeen) {
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(Call(*stub_, Request("a", 0, 1 + i % 3)).Finish().ok()) << i;
  }
  EXPECT_EQ(service_->calls().num_running_ids(), 0);
}

TEST_F(WorkerServiceTest, RequestsWithoutAnIdAreNotFenced) {
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(std::make_unique<Call>(*stub_, Request("", 0, 50)));
  for (const auto& call : calls) EXPECT_TRUE(call->Finish().ok());
}

// Attempts that overtake each other on the way: whatever the order, one of each id runs at most,
// and nothing is left.
TEST_F(WorkerServiceTest, RacingAttemptsLeaveNothingBehind) {
  std::vector<std::thread> threads;
  std::atomic<int> ok{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t attempt = 0; attempt < 20; ++attempt) {
        const grpc::Status status =
            Call(*stub_, Request(t % 2 == 0 ? "even" : "odd", attempt, 30)).Finish();
        ok += status.ok();
        EXPECT_TRUE(status.ok() || status.error_code() == grpc::ABORTED ||
                    status.error_code() == grpc::ALREADY_EXISTS)
            << status.error_message();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(ok, 0);
  EXPECT_TRUE(Await([&] {
    return group_->leader().num_requests() == 0 && service_->calls().num_open_calls() == 0;
  }));
  EXPECT_EQ(service_->calls().num_running_ids(), 0);
}

TEST_F(WorkerServiceTest, ACancelledRequestIsNotAborted) {
  Response response;
  Call call(*stub_, Request("a", 0, 490));
  ASSERT_TRUE(call.Read(response));
  service_->EndRequests();  // as a drain that runs out of time
  grpc::Status status;
  const Response rest = call.ReadAll(status);
  EXPECT_EQ(rest.finish_reason(), v1::FINISH_REASON_UNSPECIFIED);
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "this group drains");
  EXPECT_TRUE(Await([&] { return group_->leader().num_requests() == 0; }));
}

// What a drain waits for: a reader's last message, not only the end of its request.
TEST_F(WorkerServiceTest, ACallIsOpenUntilItsReaderHasItAll) {
  v1::WorkerGenerateRequest request = Request("a", 0, 100);
  request.mutable_sampling()->set_logprobs(-1);  // more than this connection buffers
  const auto stub = SlowStub();
  Call call(*stub, request);
  EXPECT_TRUE(Await([&] {
    return service_->calls().num_open_calls() == 1 && group_->leader().num_requests() == 0;
  }));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(service_->calls().num_open_calls(), 1);
  grpc::Status status;
  EXPECT_EQ(call.ReadAll(status).logprobs_size(), 100);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Await([&] { return service_->calls().num_open_calls() == 0; }));
}

TEST_F(WorkerServiceTest, AReaderWhoLetsMoreThanTheBufferPileUpLosesItsCallAlone) {
  v1::WorkerGenerateRequest request = Request("a", 0, 490);
  request.mutable_sampling()->set_logprobs(-1);  // 1.8 MB in all; the buffer is 1 MiB
  const auto stub = SlowStub();
  Call slow(*stub, request);
  EXPECT_TRUE(Call(*stub_, Request("b", 0, 490)).Finish().ok());
  EXPECT_TRUE(Await([&] { return group_->leader().num_requests() == 0; }));
  EXPECT_EQ(slow.Finish().error_code(), grpc::RESOURCE_EXHAUSTED);
}

// Of prompts of some full blocks, and of what is said of them to those who ask.
TEST_F(WorkerServiceTest, AWatcherHearsOfTheBlocksThatAreStored) {
  grpc::ClientContext context;
  v1::WatchStateRequest wanted;
  wanted.set_block_changes(true);
  const auto watch = stub_->WatchState(&context, wanted);
  v1::GroupState state;
  ASSERT_TRUE(watch->Read(&state));
  EXPECT_TRUE(state.block_changes().snapshot());
  EXPECT_EQ(state.block_changes().changes_size(), 0);

  v1::WorkerGenerateRequest request = Request("a", 0, 1);
  request.clear_prompt_token_ids();
  std::vector<std::int32_t> prompt;
  for (int i = 0; i < 40; ++i) request.add_prompt_token_ids(prompt.emplace_back(10 + i));
  std::vector<BlockHash> chain = StartHashChain("", "");
  ExtendHashChain(prompt, 16, chain);
  ASSERT_TRUE(Call(*stub_, request).Finish().ok());
  std::vector<v1::BlockChange> changes;
  std::uint64_t seq = 0;
  while (changes.size() < 2 && watch->Read(&state)) {
    const v1::BlockChanges& news = state.block_changes();
    EXPECT_FALSE(news.snapshot());
    if (news.changes_size() == 0) continue;
    EXPECT_EQ(news.seq() - static_cast<std::uint64_t>(news.changes_size()), seq) << "a gap";
    seq = news.seq();
    changes.insert(changes.end(), news.changes().begin(), news.changes().end());
  }
  ASSERT_EQ(changes.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(changes[i].hash(), std::string(chain[1 + i].begin(), chain[1 + i].end()));
    EXPECT_FALSE(changes[i].removed());
  }
  EXPECT_TRUE(changes[0].parent_hash().empty());
  EXPECT_EQ(changes[1].parent_hash(), changes[0].hash());

  // Who comes now gets both at once; who does not ask, none.
  for (const bool asks : {true, false}) {
    grpc::ClientContext late_context;
    wanted.set_block_changes(asks);
    const auto late = stub_->WatchState(&late_context, wanted);
    ASSERT_TRUE(late->Read(&state));
    EXPECT_EQ(state.has_block_changes(), asks);
    EXPECT_EQ(state.block_changes().snapshot(), asks);
    EXPECT_EQ(state.block_changes().changes_size(), asks ? 2 : 0);
    EXPECT_EQ(state.group().num_cached_blocks(), 2);
    late_context.TryCancel();
    late->Finish();
  }
  context.TryCancel();
  watch->Finish();
}

// Applies what a message says; false when it does not follow `seq`.
bool Apply(const v1::BlockChanges& news, BlockIndex& index, std::uint64_t& seq) {
  const auto to_hash = [](const std::string& bytes) {
    BlockHash hash{};
    EXPECT_EQ(bytes.size(), hash.size());
    std::copy_n(bytes.begin(), std::min(bytes.size(), hash.size()), hash.begin());
    return hash;
  };
  std::vector<BlockChange> changes;
  for (const v1::BlockChange& change : news.changes()) {
    changes.push_back({.hash = to_hash(change.hash()), .removed = change.removed()});
    if (!change.parent_hash().empty()) changes.back().parent = to_hash(change.parent_hash());
  }
  if (news.snapshot()) {
    index = BlockIndex();
  } else if (news.seq() != seq + changes.size()) {
    return false;
  }
  seq = news.seq();
  index.Apply(changes);
  return true;
}

// What waits for it stays one message, however much happens; when it reads, it has all of it.
TEST_F(WorkerServiceTest, AWatcherThatDoesNotReadMissesNothing) {
  const auto slow = SlowStub();
  grpc::ClientContext context;
  v1::WatchStateRequest wanted;
  wanted.set_block_changes(true);
  const auto watch = slow->WatchState(&context, wanted);
  for (int i = 0; i < 60; ++i) {
    v1::WorkerGenerateRequest request = Request("a", 0, 1);
    for (int t = 0; t < 150; ++t) request.add_prompt_token_ids(10 + (i * 7 + t * i) % 300);
    ASSERT_TRUE(Call(*stub_, request).Finish().ok());
    for (int publish = 0; publish < 20; ++publish) service_->SetState("busy");
  }
  EXPECT_GT(group_->leader().Stats().prefix_cache_evictions, 0u);
  grpc::ClientContext late_context;
  const auto late = stub_->WatchState(&late_context, wanted);
  v1::GroupState state;
  ASSERT_TRUE(late->Read(&state));
  BlockIndex all;
  std::uint64_t last_seq = 0;
  ASSERT_TRUE(Apply(state.block_changes(), all, last_seq));

  BlockIndex index;
  std::uint64_t seq = 0;
  int num_messages = 0;
  while (seq < last_seq && watch->Read(&state)) {
    ++num_messages;
    if (state.has_block_changes()) {
      ASSERT_TRUE(Apply(state.block_changes(), index, seq)) << "a gap";
    }
  }
  EXPECT_LT(num_messages, 60 * 20) << "it was never slow";
  EXPECT_EQ(seq, last_seq);
  EXPECT_TRUE(index == all);
  for (grpc::ClientContext* open : {&context, &late_context}) open->TryCancel();
  watch->Finish();
  late->Finish();
}

TEST_F(WorkerServiceTest, ASecondEqualRequestTellsItsCachedTokens) {
  v1::WorkerGenerateRequest request = Request("a", 0, 3);
  request.clear_prompt_token_ids();
  for (int i = 0; i < 40; ++i) request.add_prompt_token_ids(10 + i);
  std::string tokens[3];
  for (int round = 0; round < 3; ++round) {
    if (round == 2) request.set_cache_salt("a tenant's");
    grpc::Status status;
    const Response response = Call(*stub_, request).ReadAll(status);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.cached_tokens(), round == 1 ? 32 : 0);
    for (const std::int32_t id : response.token_ids()) tokens[round] += std::to_string(id) + " ";
    EXPECT_EQ(tokens[round], tokens[0]);
  }
}

TEST_F(WorkerServiceTest, AWatcherNeverSeesAnOlderStateAfterANewerOne) {
  grpc::ClientContext context;
  const auto watch = stub_->WatchState(&context, {});
  v1::GroupState state;
  ASSERT_TRUE(watch->Read(&state));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) service_->SetState("busy");
    });
  }
  std::thread last([&] {
    for (std::thread& thread : threads) thread.join();
    service_->SetState("last");
  });
  std::uint64_t seq = state.seq();
  while (watch->Read(&state)) {
    ASSERT_GT(state.seq(), seq);
    seq = state.seq();
    if (state.group().state() == "last") break;
  }
  last.join();
  EXPECT_EQ(state.group().state(), "last");
  context.TryCancel();
  watch->Finish();
}

}  // namespace
}  // namespace weft
