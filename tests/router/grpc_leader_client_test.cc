// Requests that share a stream to their leader, over real gRPC.

#include "router/grpc_leader_client.h"

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/mutex.h"
#include "server/error_reason.h"
#include "tests/router/fake_worker.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::system_clock;

constexpr auto kNoDeadline = Clock::time_point::max();

class Handler final : public LeaderClient::GenerateHandler {
 public:
  void OnResponse(v1::WorkerGenerateResponse& response) override {
    MutexLock lock(mutex_);
    EXPECT_FALSE(end_.has_value());
    for (const std::int32_t id : response.token_ids()) tokens_.push_back(id);
    changed_.NotifyAll();
  }
  void OnGenerateEnd(const absl::Status& status) override {
    MutexLock lock(mutex_);
    EXPECT_FALSE(end_.has_value()) << "a second end";
    end_ = status;
    changed_.NotifyAll();
  }
  std::vector<std::int32_t> AwaitTokens(std::size_t count) {
    MutexLock lock(mutex_);
    while (tokens_.size() < count) changed_.Wait(mutex_);
    return tokens_;
  }
  absl::Status AwaitEnd() {
    MutexLock lock(mutex_);
    while (!end_.has_value()) changed_.Wait(mutex_);
    return *end_;
  }
  std::vector<std::int32_t> tokens() {
    MutexLock lock(mutex_);
    return tokens_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::int32_t> tokens_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

v1::WorkerGenerateRequest Request(std::string id, int prompt_tokens = 1) {
  v1::WorkerGenerateRequest request;
  request.set_request_id(std::move(id));
  request.mutable_prompt_token_ids()->Resize(prompt_tokens, 1 << 28);  // 5 bytes each
  return request;
}

class GrpcLeaderClientTest : public ::testing::Test {
 protected:
  GrpcLeaderClientTest() { client_ = NewGrpcLeaderClient(address_, {}); }

  std::shared_ptr<LeaderClient::Stream> Start(const v1::WorkerGenerateRequest& request,
                                              Handler& handler,
                                              Clock::time_point deadline = kNoDeadline) {
    auto stream = client_->Generate(request, deadline, handler);
    stream->Start();
    return stream;
  }

  const std::string address_ = UniqueAddress("leader");
  FakeWorker worker_{address_};
  std::unique_ptr<LeaderClient> client_;
};

TEST_F(GrpcLeaderClientTest, TokensAndEndsReachTheRequestTheyAreOf) {
  const v1::WorkerGenerateRequest requests[] = {Request("a"), Request("b")};
  Handler a, b;
  const auto deadline = Clock::now() + std::chrono::minutes(5);
  Start(requests[0], a);
  const auto call_a = worker_.TakeCall();
  Start(requests[1], b, deadline);
  const auto call_b = worker_.TakeCall();
  EXPECT_EQ(call_a->request().request_id(), "a");
  EXPECT_EQ(call_b->request().request_id(), "b");
  EXPECT_EQ(call_a->deadline(), absl::InfiniteFuture());
  EXPECT_LT(absl::AbsDuration(call_b->deadline() - absl::FromChrono(deadline)), absl::Minutes(1));
  EXPECT_TRUE(call_a->Send({1}));
  EXPECT_TRUE(call_b->Send({10}));
  EXPECT_TRUE(call_a->Send({2, 3}));
  call_b->End(WithReason(absl::UnavailableError("drains"), kReasonDraining));
  const absl::Status end = b.AwaitEnd();
  EXPECT_EQ(end.message(), "drains");
  EXPECT_EQ(ReasonOf(end), kReasonDraining);
  EXPECT_THAT(a.AwaitTokens(3), ElementsAre(1, 2, 3));
  EXPECT_THAT(b.tokens(), ElementsAre(10));
  call_a->End(absl::InternalError("not \xff UTF-8"));
  EXPECT_EQ(a.AwaitEnd().message(), "not \xff UTF-8");
}

TEST_F(GrpcLeaderClientTest, ACancelReachesTheLeaderAndTouchesNoOther) {
  const v1::WorkerGenerateRequest request = Request("a");
  Handler a, b;
  const auto stream = Start(request, a);
  const auto call_a = worker_.TakeCall();
  Start(request, b);
  const auto call_b = worker_.TakeCall();
  stream->Cancel();
  EXPECT_TRUE(absl::IsCancelled(a.AwaitEnd()));
  call_a->WaitUntilCancelled();
  EXPECT_FALSE(call_a->Send({1}));
  EXPECT_TRUE(call_b->Send({2}));
  EXPECT_THAT(b.AwaitTokens(1), ElementsAre(2));
  call_b->End();
  EXPECT_TRUE(b.AwaitEnd().ok());
}

TEST_F(GrpcLeaderClientTest, ALeaderThatDiesIsALossToAllAndTheNextRequestReachesTheNewOne) {
  const v1::WorkerGenerateRequest request = Request("a");
  Handler a, b;
  Start(request, a);
  Start(request, b);
  worker_.TakeCall();
  worker_.TakeCall();
  worker_.Kill();
  for (Handler* handler : {&a, &b}) {
    const absl::Status end = handler->AwaitEnd();
    EXPECT_TRUE(absl::IsUnavailable(end) || absl::IsCancelled(end)) << end;
    EXPECT_EQ(ReasonOf(end), "");
  }
  worker_.Start();
  // Until the channel has connected again, requests fail at once.
  for (bool served = false; !served;) {
    Handler handler;
    const auto stream = Start(request, handler);
    for (int i = 0; i < 400 && worker_.num_calls_waiting() == 0; ++i) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    if (worker_.num_calls_waiting() > 0) {
      worker_.TakeCall()->End();
      served = handler.AwaitEnd().ok();
    } else {
      EXPECT_TRUE(absl::IsUnavailable(handler.AwaitEnd()));
    }
  }
}

// 100 MiB before a leader that takes 64.
TEST_F(GrpcLeaderClientTest, ARequestLargerThanTheLeaderTakesFailsAlone) {
  GrpcChannelOptions options;
  options.transport.max_message_bytes = std::int64_t{1} << 30;
  client_ = NewGrpcLeaderClient(address_, options);
  const v1::WorkerGenerateRequest small = Request("small");
  const v1::WorkerGenerateRequest large = Request("large", 20 << 20);
  Handler a, b;
  Start(small, a);
  const auto call = worker_.TakeCall();
  Start(large, b);
  EXPECT_TRUE(absl::IsResourceExhausted(b.AwaitEnd()));
  EXPECT_TRUE(call->Send({1}));
  EXPECT_THAT(a.AwaitTokens(1), ElementsAre(1));
  call->End();
  EXPECT_TRUE(a.AwaitEnd().ok());
}

TEST_F(GrpcLeaderClientTest, ALongPromptTravelsAloneAndEndsOrIsCancelledAsAnyOther) {
  const v1::WorkerGenerateRequest request = Request("long", 1 << 20);
  for (const bool cancel : {false, true}) {
    Handler handler;
    const auto stream = Start(request, handler);
    const auto call = worker_.TakeCall();
    EXPECT_EQ(call->request().prompt_token_ids_size(), 1 << 20);
    EXPECT_TRUE(call->Send({1}));
    handler.AwaitTokens(1);
    if (cancel) {
      stream->Cancel();
      call->WaitUntilCancelled();
    } else {
      call->End();
    }
    EXPECT_EQ(handler.AwaitEnd().ok(), !cancel);
  }
}

// A client may go while its calls run: they are told.
TEST_F(GrpcLeaderClientTest, CallsOutliveTheClientUntilTheirEnd) {
  const v1::WorkerGenerateRequest request = Request("a");
  Handler handler;
  Start(request, handler);
  const auto call = worker_.TakeCall();
  client_ = nullptr;
  EXPECT_TRUE(call->Send({1}));
  handler.AwaitTokens(1);
  call->End();
  EXPECT_TRUE(handler.AwaitEnd().ok());
}

// Starts, cancels, ends and deaths of the leader that race: every request ends once, whole if OK.
TEST_F(GrpcLeaderClientTest, EveryRequestEndsOnceWhateverRacesWithWhat) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  std::thread leader([&] {
    while (true) {
      const auto call = worker_.TakeCall();
      if (call->request().request_id() == "last") return call->End();
      for (int id = 0; id < 8; ++id) call->Send({id});
      call->End();
    }
  });
  const v1::WorkerGenerateRequest requests[] = {Request("small"), Request("large", 60'000)};
  for (int round = 0; round < 40; ++round) {
    constexpr int kCalls = 32;
    std::vector<Handler> handlers(kCalls);
    std::vector<std::shared_ptr<LeaderClient::Stream>> streams;
    for (Handler& handler : handlers) {
      streams.push_back(Start(requests[random() % 8 == 0 ? 1 : 0], handler));
    }
    for (const auto& stream : streams) {
      if (random() % 3 == 0) stream->Cancel();
    }
    if (round % 10 == 9) {
      worker_.Kill();
      worker_.Start();
    }
    for (Handler& handler : handlers) {
      const absl::Status end = handler.AwaitEnd();
      EXPECT_TRUE(end.ok() || absl::IsCancelled(end) || absl::IsUnavailable(end)) << end;
      if (!end.ok()) continue;
      EXPECT_THAT(handler.tokens(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    }
  }
  const v1::WorkerGenerateRequest last_request = Request("last");
  for (bool stopped = false; !stopped;) {
    Handler last;
    Start(last_request, last);
    stopped = last.AwaitEnd().ok();
  }
  leader.join();
}

}  // namespace
}  // namespace weft
