// Many streams at once over real gRPC: cancels, aborts, completions and losses that race.

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "gtest/gtest.h"
#include "server/base/mutex.h"
#include "server/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

class RouterStormTest : public RouterFixture {
 protected:
  // Answers every call with "abcdefgh" and an end of sequence, until StopLeader().
  void StartLeader() {
    leader_ = std::thread([this] {
      while (true) {
        const auto call = worker().TakeCall();
        if (stopping_) return;
        for (int i = call->request().resume_token_ids_size(); i < 8; ++i) call->Send({'a' + i});
        call->Send({kEndToken}, v1::FINISH_REASON_STOP);
        call->End();
      }
    });
  }
  void StopLeader() {
    stopping_ = true;
    const auto last = Send(TextRequest("x"));  // wakes the leader's thread
    leader_.join();
    last->Cancel();
    last->Wait();
  }

  std::atomic<bool> stopping_ = false;
  std::thread leader_;
};

// Cancels, completions and losses of the group at the same time: every stream ends, whole
// unless it was cancelled, and no request stays behind in the router's count.
TEST_F(RouterStormTest, CancelsAndLossesLeaveNoRequestBehind) {
  StartOne();
  constexpr unsigned kSeed = 20260731;
  SCOPED_TRACE(fmt::format("seed {}", kSeed));
  std::mt19937 random(kSeed);
  StartLeader();
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (int i = 0; i < 16; ++i) streams.push_back(Send(TextRequest("x")));
    for (const auto& stream : streams) {
      if (random() % 2 == 0) stream->Cancel();
    }
    if (round % 5 == 4) {
      worker().Kill();
      worker().Start();
    }
    for (const auto& stream : streams) {
      const absl::Status& status = stream->Wait();
      EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
      EXPECT_TRUE(!status.ok() || stream->Text() == "abcdefgh") << stream->Text();
    }
  }
  StopLeader();
  StopRouter();  // waits for every lease
}

// One stream of the big storm: cancelled at once, after a message, or not at all.
class StormCall final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  struct Tally {
    Mutex mutex;
    CondVar changed;
    int running ABSL_GUARDED_BY(mutex) = 0;
    int completed ABSL_GUARDED_BY(mutex) = 0;
    int cancelled ABSL_GUARDED_BY(mutex) = 0;
    int aborted ABSL_GUARDED_BY(mutex) = 0;
  };
  enum class Kind { kCompletes, kCancelledAtOnce, kCancelledLater };

  static void Start(v1::Inference::Stub& stub, v1::GenerateRequest request, Kind kind,
                    Tally& tally) {
    auto* call = new StormCall(std::move(request), kind, tally);
    stub.async()->Generate(&call->context_, &call->request_, call);
    call->StartRead(&call->response_);
    call->AddHold();
    call->StartCall();
    if (kind == Kind::kCancelledAtOnce) call->context_.TryCancel();
    call->RemoveHold();
  }

 private:
  StormCall(v1::GenerateRequest request, Kind kind, Tally& tally)
      : request_(std::move(request)), kind_(kind), tally_(tally) {}

  void OnReadDone(bool ok) override {
    if (!ok) return;
    EXPECT_EQ(response_.seq(), next_seq_++);
    text_ += response_.text();
    aborted_ |= response_.finish_reason() == v1::FINISH_REASON_ABORTED;
    if (kind_ == Kind::kCancelledLater) context_.TryCancel();
    response_.Clear();
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED)
        << status.error_message();
    if (status.ok() && !aborted_) {
      std::sort(text_.begin(), text_.end());  // of two samples, perhaps
      EXPECT_EQ(text_, request_.sampling().n() == 2 ? "aabbccddeeffgghh" : "abcdefgh");
    }
    {
      MutexLock lock(tally_.mutex);
      ++(!status.ok() ? tally_.cancelled : aborted_ ? tally_.aborted : tally_.completed);
      --tally_.running;
      tally_.changed.NotifyAll();
    }
    delete this;
  }

  const v1::GenerateRequest request_;
  const Kind kind_;
  Tally& tally_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  std::uint64_t next_seq_ = 0;
  std::string text_;
  bool aborted_ = false;
};

TEST_F(RouterStormTest, TenThousandStreamsEndWhateverRacesWithWhat) {
  constexpr int kStreams = 10000;
  constexpr int kAtOnce = 64;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  StartOne();
  StartLeader();
  StormCall::Tally tally;
  for (int i = 0; i < kStreams; ++i) {
    {
      MutexLock lock(tally.mutex);
      while (tally.running >= kAtOnce) tally.changed.Wait(tally.mutex);
      ++tally.running;
    }
    v1::GenerateRequest request = TextRequest("x");
    request.set_request_id(fmt::format("storm-{}", i));
    if (random() % 8 == 0) request.mutable_sampling()->set_n(2);
    StormCall::Start(*stub_, std::move(request), static_cast<StormCall::Kind>(random() % 3), tally);
    if (random() % 8 == 0) {
      grpc::ClientContext context;
      v1::AbortRequest abort;
      abort.set_request_id(fmt::format("storm-{}", i - static_cast<int>(random() % 4)));
      v1::AbortResponse response;
      EXPECT_TRUE(stub_->Abort(&context, abort, &response).ok());
    }
  }
  {
    MutexLock lock(tally.mutex);
    while (tally.running > 0) tally.changed.Wait(tally.mutex);
    EXPECT_EQ(tally.completed + tally.cancelled + tally.aborted, kStreams);
    EXPECT_GT(tally.completed, 0);
    EXPECT_GT(tally.cancelled, 0);
    RecordProperty("aborted", tally.aborted);
  }
  StopLeader();
  EXPECT_TRUE(
      registry_.WaitForNoStreams(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
  EXPECT_TRUE(registry_.All().empty());
  StopRouter();  // waits for every lease
}

}  // namespace
}  // namespace weft
