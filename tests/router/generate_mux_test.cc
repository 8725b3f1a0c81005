#include "router/generate_mux.h"

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Clock = std::chrono::system_clock;

constexpr auto kNoDeadline = Clock::time_point::max();

// Each command as "start N" or "cancel N".
std::string TextOf(const v1::GenerateCommand& command) {
  return fmt::format("{} {}", command.has_start() ? "start" : "cancel", command.call());
}

// The leader's connection; writes are taken when the test says so.
struct ManualSink : StreamSink<v1::GenerateCommand> {
  void StartWrite(const v1::GenerateCommand& command) override {
    writing = true;
    written.push_back(TextOf(command));
    last = command;
  }
  void Finish(const absl::Status&) override { ++finishes; }
  bool writing = false;
  std::vector<std::string> written;
  v1::GenerateCommand last;
  int finishes = 0;
};

// Puts calls onto `mux`, and keeps what is to run soon.
struct ManualOpener : MuxCall::Opener {
  void Place(const std::shared_ptr<MuxCall>& call) override {
    if (before != nullptr) before();
    EXPECT_TRUE(mux->Start(call));
  }
  void RunSoon(std::function<void()> task) override { soon.push_back(std::move(task)); }
  void RunAll() {
    for (const auto& task : std::exchange(soon, {})) task();
  }
  std::shared_ptr<GenerateMux> mux;
  std::function<void()> before;
  std::vector<std::function<void()>> soon;
};

struct Recorder : LeaderClient::GenerateHandler {
  void OnResponse(v1::WorkerGenerateResponse& response) override {
    EXPECT_FALSE(end.has_value()) << "a response after the end";
    for (const std::int32_t id : response.token_ids()) tokens.push_back(id);
    if (on_response != nullptr) on_response();
  }
  void OnGenerateEnd(const absl::Status& status) override {
    EXPECT_FALSE(end.has_value()) << "a second end";
    end = status;
  }
  std::vector<std::int32_t> tokens;
  std::function<void()> on_response;
  std::optional<absl::Status> end;
};

v1::GenerateEvents Event(std::uint64_t call, std::vector<std::int32_t> tokens,
                         std::optional<int> end_code = std::nullopt) {
  v1::GenerateEvents events;
  v1::GenerateEvent& event = *events.add_events();
  event.set_call(call);
  if (!tokens.empty()) {
    event.mutable_response()->mutable_token_ids()->Add(tokens.begin(), tokens.end());
  }
  if (end_code) event.mutable_end()->set_code(*end_code);
  return events;
}

class GenerateMuxTest : public ::testing::Test {
 protected:
  GenerateMuxTest() { Make(/*alone=*/false); }
  // Streams end, and whatever runs there.
  ~GenerateMuxTest() override {
    mux().Close();
    if (sink_.writing) WriteDone();
    mux().OnEnd(absl::OkStatus());
    opener_->RunAll();
  }

  void Make(bool alone) { opener_->mux = std::make_shared<GenerateMux>(sink_, alone); }
  GenerateMux& mux() { return *opener_->mux; }
  void WriteDone() {
    sink_.writing = false;
    mux().OnWriteDone(true);
  }
  std::shared_ptr<MuxCall> NewCall(Recorder& handler, Clock::time_point deadline = kNoDeadline) {
    return std::make_shared<MuxCall>(opener_, request_, deadline, handler);
  }
  void Send(v1::GenerateEvents events) { mux().OnEvents(events); }

  ManualSink sink_;
  const std::shared_ptr<ManualOpener> opener_ = std::make_shared<ManualOpener>();
  v1::WorkerGenerateRequest request_;
  Recorder a_, b_;
};

TEST_F(GenerateMuxTest, EachCallGetsWhatIsForItAndItsEndOnce) {
  NewCall(a_)->Start();
  NewCall(b_)->Start();
  v1::GenerateEvents events = Event(1, {5});
  events.MergeFrom(Event(2, {7}, 14));
  events.MergeFrom(Event(1, {6}));
  Send(events);
  Send(Event(2, {8}));  // it has ended
  Send(Event(3, {9}));  // there is none
  EXPECT_THAT(a_.tokens, ElementsAre(5, 6));
  EXPECT_THAT(b_.tokens, ElementsAre(7));
  EXPECT_TRUE(absl::IsUnavailable(*b_.end));
  EXPECT_FALSE(a_.end.has_value());
  Send(Event(1, {}, 0));
  EXPECT_TRUE(a_.end->ok());
  WriteDone();
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("start 1", "start 2"));
}

TEST_F(GenerateMuxTest, TheRequestAndTheTimeUntilItsDeadlineTravel) {
  request_.set_request_id("r");
  NewCall(a_, Clock::now() + std::chrono::hours(1))->Start();
  EXPECT_EQ(sink_.last.start().request_id(), "r");
  EXPECT_LE(sink_.last.timeout_us(), 3'600'000'000);
  EXPECT_GT(sink_.last.timeout_us(), 3'500'000'000);
  WriteDone();
  NewCall(b_)->Start();
  EXPECT_FALSE(sink_.last.has_timeout_us());
}

TEST_F(GenerateMuxTest, CancelTellsTheLeaderAndEndsTheCallElsewhereWithoutIt) {
  const auto call = NewCall(a_);
  call->Start();
  call->Cancel();
  call->Cancel();
  EXPECT_FALSE(a_.end.has_value());  // never inside Cancel()
  Send(Event(1, {5}, 0));            // on its way already
  opener_->RunAll();
  EXPECT_TRUE(absl::IsCancelled(*a_.end));
  EXPECT_THAT(a_.tokens, IsEmpty());
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("start 1", "cancel 1"));
}

TEST_F(GenerateMuxTest, ACallCancelledBeforeItsStartNeverTravels) {
  const auto call = NewCall(a_);
  call->Cancel();
  call->Start();
  EXPECT_FALSE(a_.end.has_value());
  opener_->RunAll();
  EXPECT_TRUE(absl::IsCancelled(*a_.end));
  EXPECT_THAT(sink_.written, IsEmpty());
}

TEST_F(GenerateMuxTest, ACancelDoesNotOvertakeTheStart) {
  const auto call = NewCall(a_);
  opener_->before = [&] { call->Cancel(); };  // while it is being placed
  call->Start();
  opener_->RunAll();
  EXPECT_TRUE(absl::IsCancelled(*a_.end));
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("start 1", "cancel 1"));
}

TEST_F(GenerateMuxTest, AHandlerMayCancelItsCallInsideAResponse) {
  const auto call = NewCall(a_);
  a_.on_response = [&] { call->Cancel(); };
  call->Start();
  v1::GenerateEvents events = Event(1, {5});
  events.MergeFrom(Event(1, {6}, 0));
  Send(events);  // the end is in the same message: then that is the end
  opener_->RunAll();
  EXPECT_TRUE(a_.end.has_value());
  EXPECT_EQ(a_.tokens.front(), 5);
}

TEST_F(GenerateMuxTest, CancellingAfterTheEndDoesNothing) {
  const auto call = NewCall(a_);
  call->Start();
  Send(Event(1, {}, 0));
  call->Cancel();
  EXPECT_THAT(opener_->soon, IsEmpty());
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("start 1"));
}

// Whatever ended the stream that it shared with others, a call did not do it: it goes on elsewhere.
TEST_F(GenerateMuxTest, TheEndOfTheStreamIsALossToEveryCall) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::InternalError("x"), absl::ResourceExhaustedError("too large")}) {
    sink_ = {};
    Make(/*alone=*/false);
    Recorder a, b;
    NewCall(a)->Start();
    NewCall(b)->Start();
    WriteDone();
    WriteDone();
    mux().Close();
    EXPECT_EQ(sink_.finishes, 1);
    mux().OnEnd(status);
    for (const Recorder* recorder : {&a, &b}) EXPECT_TRUE(absl::IsUnavailable(*recorder->end));
    EXPECT_FALSE(mux().Start(NewCall(a_)));
  }
}

TEST_F(GenerateMuxTest, ACallAloneKeepsTheStatusOfItsStream) {
  Make(/*alone=*/true);
  NewCall(a_)->Start();
  WriteDone();
  mux().Close();
  mux().OnEnd(absl::ResourceExhaustedError("too large"));
  EXPECT_TRUE(absl::IsResourceExhausted(*a_.end));
}

TEST_F(GenerateMuxTest, AStreamForOneCallEndsWithItEitherWay) {
  for (const bool cancel : {false, true}) {
    sink_ = {};
    Make(/*alone=*/true);
    Recorder handler;
    const auto call = NewCall(handler);
    call->Start();
    WriteDone();
    EXPECT_EQ(sink_.finishes, 0);
    if (cancel) {
      call->Cancel();
    } else {
      Send(Event(1, {5}, 0));
    }
    EXPECT_EQ(sink_.finishes, 1);
    opener_->RunAll();
    EXPECT_EQ(absl::IsCancelled(*handler.end), cancel);
    EXPECT_TRUE(mux().closed());
  }
}

// --- The storm: starts, cancels, events and the loss of the stream on threads of their own.

struct StormHandler : LeaderClient::GenerateHandler {
  void OnResponse(v1::WorkerGenerateResponse& response) override {
    EXPECT_EQ(ends, 0);
    for (const std::int32_t id : response.token_ids()) EXPECT_EQ(id, next++);
  }
  void OnGenerateEnd(const absl::Status&) override { ++ends; }
  int next = 0;  // unguarded: one call at a time
  std::atomic<int> ends = 0;
};

// A leader that answers every start with three tokens and an end, as far as it is not cancelled.
class StormLeader final : public StreamSink<v1::GenerateCommand> {
 public:
  ~StormLeader() override { thread_.join(); }
  void Run(std::shared_ptr<GenerateMux> mux, unsigned seed) {
    thread_ = std::thread([this, mux = std::move(mux), seed] {
      std::minstd_rand random(seed);
      std::vector<std::pair<std::uint64_t, int>> running;
      while (!finished_) {
        if (writing_) {
          if (command_.has_start()) running.emplace_back(command_.call(), 0);
          writing_ = false;
          mux->OnWriteDone(true);
        }
        v1::GenerateEvents events;
        for (auto& [call, next] : running) {
          if (random() % 2 == 0) continue;
          if (next == 3) {
            events.MergeFrom(Event(call, {}, 0));
          } else {
            events.MergeFrom(Event(call, {next}));
          }
          ++next;
        }
        std::erase_if(running, [](const auto& call) { return call.second > 3; });
        mux->OnEvents(events);
        std::this_thread::yield();
      }
      mux->OnEnd(absl::UnavailableError("gone"));
    });
  }

 private:
  void StartWrite(const v1::GenerateCommand& command) override {
    command_ = command;
    EXPECT_FALSE(writing_.exchange(true));
  }
  void Finish(const absl::Status&) override { finished_ = true; }

  v1::GenerateCommand command_;
  std::atomic<bool> writing_ = false;
  std::atomic<bool> finished_ = false;
  std::thread thread_;
};

class StormOpener final : public MuxCall::Opener {
 public:
  // Once nothing calls RunSoon() any more.
  void Join() {
    for (std::thread& thread : threads_) thread.join();
  }
  void Place(const std::shared_ptr<MuxCall>& call) override {
    if (!mux->Start(call)) ++refused;
  }
  void RunSoon(std::function<void()> task) override {
    MutexLock lock(mutex_);
    threads_.emplace_back(std::move(task));
  }
  std::shared_ptr<GenerateMux> mux;
  std::atomic<int> refused = 0;

 private:
  Mutex mutex_;
  std::vector<std::thread> threads_;  // grows under mutex_
};

TEST(GenerateMuxStormTest, EveryCallEndsOnceWhateverRacesWithWhat) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  const v1::WorkerGenerateRequest request;
  for (unsigned round = 0; round < 20; ++round) {
    constexpr std::size_t kCalls = 64;
    std::vector<StormHandler> handlers(kCalls);
    std::vector<std::shared_ptr<MuxCall>> calls;
    int refused = 0;
    {
      StormLeader leader;
      const auto opener = std::make_shared<StormOpener>();
      opener->mux = std::make_shared<GenerateMux>(leader, /*alone=*/false);
      for (StormHandler& handler : handlers) {
        calls.push_back(std::make_shared<MuxCall>(opener, request, kNoDeadline, handler));
      }
      leader.Run(opener->mux, seed + round);
      std::vector<std::thread> threads;
      for (std::size_t t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
          for (std::size_t i = t; i < kCalls; i += 2) calls[i]->Start();
        });
      }
      threads.emplace_back([&] {
        std::minstd_rand random(seed + round);
        for (std::size_t i = 0; i < kCalls; ++i) {
          if (random() % 2 == 0) calls[random() % kCalls]->Cancel();
          std::this_thread::yield();
        }
      });
      if (round % 2 == 0) threads.emplace_back([&] { opener->mux->Close(); });
      for (std::thread& thread : threads) thread.join();
      opener->Join();
      opener->mux->Close();
      refused = opener->refused;
    }
    int ended = 0;
    for (const StormHandler& handler : handlers) ended += handler.ends;
    EXPECT_EQ(ended + refused, static_cast<int>(kCalls));
  }
}

}  // namespace
}  // namespace weft
