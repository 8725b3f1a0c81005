// The router against scripted leaders, over real gRPC on abstract sockets.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/cluster.h"
#include "router/router_service.h"
#include "router/text/byte_level.h"
#include "router/text/tokenizer.h"
#include "router/text_pool.h"
#include "server/grpc_server.h"
#include "server/grpc_status.h"
#include "tests/router/fake_worker.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int32_t kEnd = 256;  // a special token

// A tokenizer whose ids are the bytes of the text.
std::unique_ptr<Tokenizer> ByteTokenizer() {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocab[ByteLevelSpelling(static_cast<std::uint8_t>(byte))] = byte;
  }
  const nlohmann::json file = {
      {"version", "1.0"},
      {"added_tokens",
       {{{"id", kEnd},
         {"content", "<end>"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
  auto tokenizer = Tokenizer::Parse(file.dump(), "bytes");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::vector<std::int32_t> Ids(std::string_view text) {
  return {reinterpret_cast<const unsigned char*>(text.data()),
          reinterpret_cast<const unsigned char*>(text.data()) + text.size()};
}

v1::GenerateRequest TextRequest(std::string_view text) {
  v1::GenerateRequest request;
  request.set_text(std::string(text));
  return request;
}

// A request under way in a thread of its own, and what came of it.
class Stream {
 public:
  Stream(
      v1::Inference::Stub& stub, v1::GenerateRequest request,
      std::chrono::system_clock::time_point deadline = std::chrono::system_clock::time_point::max())
      : request_(std::move(request)) {
    context_.set_deadline(deadline);
    thread_ = std::thread([this, &stub] {
      const auto reader = stub.Generate(&context_, request_);
      v1::GenerateResponse response;
      while (reader->Read(&response)) responses_.push_back(response);
      status_ = FromGrpcStatus(reader->Finish());
      ended_ = true;
    });
  }
  ~Stream() {
    Cancel();
    Wait();
  }

  void Cancel() { context_.TryCancel(); }
  bool ended() const { return ended_; }
  const absl::Status& Wait() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  // After Wait().
  const std::vector<v1::GenerateResponse>& responses() const { return responses_; }
  std::string Text() const {
    std::string text;
    for (const auto& response : responses_) text += response.text();
    return text;
  }
  std::vector<std::int32_t> TokenIds() const {
    std::vector<std::int32_t> ids;
    for (const auto& r : responses_)
      ids.insert(ids.end(), r.token_ids().begin(), r.token_ids().end());
    return ids;
  }

 private:
  v1::GenerateRequest request_;
  grpc::ClientContext context_;
  std::vector<v1::GenerateResponse> responses_;
  absl::Status status_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

class RouterTest : public ::testing::Test {
 protected:
  // Starts a router over `workers`' addresses.
  void StartRouter(std::vector<std::string> addresses, ClusterOptions options = {}) {
    options.addresses = std::move(addresses);
    cluster_ = std::make_unique<Cluster>(options);
    text_pool_ = std::make_unique<TextPool>(2, 64);
    context_.cluster = cluster_.get();
    context_.text_pool = text_pool_.get();
    service_ = std::make_unique<RouterService>(context_);
    const std::string address = UniqueAddress("router");
    auto server = GrpcServer::Start({.listen_addresses = {address}}, {service_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = NewGrpcChannel(address);
    stub_ = v1::Inference::NewStub(channel_);
  }

  void WaitUntilReady(std::size_t group, bool ready = true) {
    while (cluster_->Snapshot()->groups[group]->ready != ready) {
      absl::SleepFor(absl::Milliseconds(5));
    }
  }

  std::unique_ptr<Stream> Send(v1::GenerateRequest request) {
    return std::make_unique<Stream>(*stub_, std::move(request));
  }

  const std::unique_ptr<Tokenizer> tokenizer_ = ByteTokenizer();
  GenerateContext context_ = {.limits = {.served_model_name = "tiny"},
                              .tokenizer = tokenizer_.get()};
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<TextPool> text_pool_;
  std::unique_ptr<RouterService> service_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(RouterTest, StreamsTokensTextAndUsageInOrder) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto stream = Send(TextRequest("ab<end>"));
  const auto call = worker.TakeCall();
  EXPECT_THAT(call->request().prompt_token_ids(), ElementsAre('a', 'b', kEnd));
  for (const char c : std::string_view("hello")) call->Send({c});
  call->Send({kEnd}, v1::FINISH_REASON_STOP);
  call->End();

  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "hello");
  EXPECT_THAT(stream->TokenIds(), ElementsAre('h', 'e', 'l', 'l', 'o', kEnd));
  const auto& responses = stream->responses();
  EXPECT_THAT(responses[0].prompt_token_ids(), ElementsAre('a', 'b', kEnd));
  int tokens = 0;
  for (std::size_t i = 0; i < responses.size(); ++i) {
    tokens += responses[i].token_ids_size();
    EXPECT_EQ(responses[i].seq(), i);
    EXPECT_EQ(responses[i].request_id(), call->request().request_id());
    EXPECT_EQ(responses[i].usage().prompt_tokens(), 3);
    EXPECT_EQ(responses[i].usage().completion_tokens(), tokens);
    EXPECT_EQ(responses[i].prompt_token_ids().empty(), i > 0);
    EXPECT_EQ(responses[i].finish_reason() == v1::FINISH_REASON_STOP, i + 1 == responses.size());
  }
}

TEST_F(RouterTest, NeverSplitsACharacter) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto stream = Send(TextRequest("x"));
  const auto call = worker.TakeCall();
  const std::string text = "aé€😀b";
  for (const std::int32_t id : Ids(text)) call->Send({id});
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
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  v1::GenerateRequest request;
  request.set_request_id("mine");
  request.mutable_token_ids()->add_ids(7);
  request.mutable_sampling()->set_seed(0);
  request.mutable_sampling()->set_top_k(0);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->add_stop_token_ids(5);
  const auto given = Send(request);
  const auto given_call = worker.TakeCall();
  EXPECT_EQ(given_call->request().request_id(), "mine");
  EXPECT_THAT(given_call->request().prompt_token_ids(), ElementsAre(7));
  EXPECT_EQ(given_call->request().sampling().SerializeAsString(),
            request.sampling().SerializeAsString());

  std::vector<std::uint64_t> seeds;
  std::vector<std::string> ids;
  for (int i = 0; i < 2; ++i) {
    const auto drawn = Send(TextRequest("x"));
    const auto call = worker.TakeCall();
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
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto stream = Send(TextRequest("x"));
  const auto call = worker.TakeCall();
  call->Send({'a'});
  stream->Cancel();
  EXPECT_TRUE(absl::IsCancelled(stream->Wait())) << stream->Wait();
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, DeadlineReachesTheLeader) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  WaitUntilReady(0);
  Stream stream(*stub_, TextRequest("x"),
                std::chrono::system_clock::now() + std::chrono::seconds(2));
  const auto call = worker.TakeCall();
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream.Wait())) << stream.Wait();
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, LostGroupEndsItsStreamsAndIsFoundAgain) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 3; ++i) {
    streams.push_back(Send(TextRequest("x")));
    worker.TakeCall()->Send({'a'});
  }
  worker.Kill();
  for (const auto& stream : streams) {
    EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
    EXPECT_EQ(ReasonOf(stream->Wait()), kReasonRankLost) << stream->Wait();
  }
  WaitUntilReady(0, false);
  const auto waiting = Send(TextRequest("y"));
  worker.Start();
  const auto call = worker.TakeCall();
  call->Send({'z'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(waiting->Wait().ok()) << waiting->Wait();
  EXPECT_EQ(waiting->Text(), "z");
}

TEST_F(RouterTest, SilentGroupIsLost) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address}, {.link = {.heartbeat_timeout = std::chrono::milliseconds(500)}});
  const auto stream = Send(TextRequest("x"));
  const auto call = worker.TakeCall();
  worker.FallSilent();
  EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonRankLost);
  EXPECT_THAT(std::string(stream->Wait().message()), HasSubstr("silent for 500 ms"));
  call->WaitUntilCancelled();
}

TEST_F(RouterTest, LossOfOneGroupLeavesTheOthersAlone) {
  const std::vector<std::string> addresses = {UniqueAddress("a"), UniqueAddress("b")};
  FakeWorker a(addresses[0]);
  FakeWorker b(addresses[1]);
  StartRouter(addresses);
  WaitUntilReady(0);
  WaitUntilReady(1);
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

TEST_F(RouterTest, RequestRefusedByADrainingGroupGoesToAnotherOne) {
  const std::vector<std::string> addresses = {UniqueAddress("a"), UniqueAddress("b")};
  FakeWorker a(addresses[0]);
  FakeWorker b(addresses[1]);
  a.RefuseCalls(WithReason(absl::UnavailableError("stopping"), kReasonDraining));
  StartRouter(addresses);
  WaitUntilReady(0);
  WaitUntilReady(1);
  for (int i = 0; i < 3; ++i) {
    const auto stream = Send(TextRequest("x"));
    const auto call = b.TakeCall();
    call->Send({'b'}, v1::FINISH_REASON_LENGTH);
    call->End();
    EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  }
}

TEST_F(RouterTest, ARefusedRequestIsPlacedUpToMaxAttempts) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  worker.RefuseCalls(WithReason(absl::UnavailableError("stopping"), kReasonDraining));
  context_.max_attempts = 2;
  StartRouter({address});
  const auto stream = Send(TextRequest("x"));
  EXPECT_TRUE(absl::IsUnavailable(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonDraining);
  EXPECT_EQ(worker.num_refused(), 2);
}

TEST_F(RouterTest, ASlowReaderLosesItsOwnStreamOnly) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  context_.max_stream_buffer_bytes = 1 << 16;
  StartRouter({address});
  grpc::ClientContext slow_context;
  const auto slow = stub_->Generate(&slow_context, TextRequest("x"));  // and reads nothing
  const auto slow_call = worker.TakeCall();
  const auto other = Send(TextRequest("x"));
  const auto other_call = worker.TakeCall();
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
  FakeWorker worker(address, loading);
  StartRouter({address});
  while (cluster_->Snapshot()->groups[0]->state != "loading") {
    absl::SleepFor(absl::Milliseconds(5));
  }
  const auto stream = Send(TextRequest("x"));
  worker.SetState(FakeWorker::ReadyState());
  const auto call = worker.TakeCall();
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
  const std::vector<std::string> addresses = {UniqueAddress("a"), UniqueAddress("b")};
  FakeWorker a(addresses[0]);
  FakeWorker b(addresses[1]);
  StartRouter(addresses);
  WaitUntilReady(0);
  WaitUntilReady(1);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 6; ++i) streams.push_back(Send(TextRequest("x")));
  while (a.num_calls_waiting() + b.num_calls_waiting() < 6) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(a.num_calls_waiting(), 3);
  EXPECT_EQ(b.num_calls_waiting(), 3);
}

// Cancels, completions and losses of the group at the same time: every stream ends, and no request
// stays behind in the router's count.
TEST_F(RouterTest, AStormOfCancelsLeavesNoRequestBehind) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  WaitUntilReady(0);
  constexpr unsigned kSeed = 20260731;
  SCOPED_TRACE(fmt::format("seed {}", kSeed));
  std::mt19937 random(kSeed);
  std::atomic<bool> stopping = false;
  std::thread leader([&] {
    while (true) {
      const auto call = worker.TakeCall();
      if (stopping) return;
      for (int i = 0; i < 8; ++i) call->Send({'a' + i});
      call->Send({kEnd}, v1::FINISH_REASON_STOP);
      call->End();
    }
  });
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (int i = 0; i < 16; ++i) streams.push_back(Send(TextRequest("x")));
    for (const auto& stream : streams) {
      if (random() % 2 == 0) stream->Cancel();
    }
    if (round % 5 == 4) {
      worker.Kill();
      worker.Start();
    }
    for (const auto& stream : streams) {
      const absl::Status& status = stream->Wait();
      EXPECT_TRUE(status.ok() || absl::IsCancelled(status) || ReasonOf(status) == kReasonRankLost)
          << status;
      EXPECT_TRUE(!status.ok() || stream->Text() == "abcdefgh") << stream->Text();
    }
  }
  stopping = true;
  const auto last = Send(TextRequest("x"));  // wakes the leader's thread
  leader.join();
  last->Cancel();
  last->Wait();
  server_ = nullptr;
  text_pool_ = nullptr;
  cluster_ = nullptr;  // waits for every lease
}

TEST_F(RouterTest, BadRequestsAreRefusedAndOthersUnharmed) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto good = Send(TextRequest("x"));
  const auto call = worker.TakeCall();

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
  EXPECT_EQ(worker.TakeCall()->request().prompt_token_ids_size(), 63);
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
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto stream = Send(TextRequest("x"));
  const auto call = worker.TakeCall();
  call->Send({'a'});
  call->End();
  EXPECT_TRUE(absl::IsInternal(stream->Wait())) << stream->Wait();
}

TEST_F(RouterTest, WhatTheLeaderRefusesArrivesAsItSaidIt) {
  const std::string address = UniqueAddress("leader");
  FakeWorker worker(address);
  StartRouter({address});
  const auto stream = Send(TextRequest("x"));
  worker.TakeCall()->End(
      WithReason(absl::ResourceExhaustedError("1024 requests wait"), kReasonOverloaded));
  EXPECT_TRUE(absl::IsResourceExhausted(stream->Wait())) << stream->Wait();
  EXPECT_EQ(ReasonOf(stream->Wait()), kReasonOverloaded);
  EXPECT_EQ(stream->Wait().message(), "1024 requests wait");
}

TEST_F(RouterTest, ServerInfoListsEveryGroup) {
  const std::string address = UniqueAddress("leader");
  const std::string nobody = UniqueAddress("nobody");
  FakeWorker worker(address);
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
