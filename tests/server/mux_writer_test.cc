#include "server/mux_writer.h"

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/error_reason.h"
#include "tests/server/manual_sink.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Response = v1::WorkerGenerateResponse;

Response Tokens(std::vector<std::int32_t> ids) {
  Response response;
  response.mutable_token_ids()->Add(ids.begin(), ids.end());
  return response;
}
std::int64_t NumTokens(const Response& response) { return response.token_ids_size(); }
bool Append(Response& into, Response& next) {
  into.MergeFrom(next);
  return true;
}

// Each event as "CALL:TOKENS", an end as "!CODE".
struct EventSink : ManualSink<v1::GenerateEvents> {
  void StartWrite(const v1::GenerateEvents& message) override {
    ManualSink::StartWrite(message);
    EXPECT_GT(message.events_size(), 0);
    std::string text;
    for (const v1::GenerateEvent& event : message.events()) {
      text += fmt::format("{}{}:", text.empty() ? "" : " ", event.call());
      for (const std::int32_t id : event.response().token_ids()) text += fmt::format("{},", id);
      if (!event.has_end()) continue;
      last_end = event.end();
      text += fmt::format("!{}", event.end().code());
    }
    written.push_back(text);
    bytes.push_back(message.ByteSizeLong());
  }
  std::vector<std::string> written;
  std::vector<std::size_t> bytes;
  v1::GenerateEnd last_end;
};

class MuxWriterTest : public ::testing::Test {
 protected:
  ~MuxWriterTest() override { EndStream(); }

  void EndStream() {
    mux_->End(absl::OkStatus());
    if (sink_.writing) WriteDone(false);
  }

  MuxWriter& Make(MuxWriterOptions options) {
    if (mux_ != nullptr) EndStream();
    cancelled_.clear();
    sink_ = {};
    options.size_bytes = NumTokens;
    options.total_buffered_bytes = &total_;
    mux_ = std::make_shared<MuxWriter>(sink_, options);
    return *mux_;
  }
  std::shared_ptr<CallWriter> Open(std::uint64_t call) {
    return mux_->Open(call, [this, call] { cancelled_.push_back(call); });
  }
  void WriteDone(bool ok = true) {
    ASSERT_TRUE(sink_.writing);
    sink_.writing = false;
    mux_->OnWriteDone(ok);
  }

  EventSink sink_;
  std::atomic<std::int64_t> total_ = 0;
  std::shared_ptr<MuxWriter> mux_;
  std::vector<std::uint64_t> cancelled_;
};

TEST_F(MuxWriterTest, AMessageTakesAllThatWaitsEachCallsInOrderAndItsEndLast) {
  Make({});
  const auto a = Open(7);
  const auto b = Open(9);
  EXPECT_TRUE(a->Write(Tokens({1})));  // goes at once
  EXPECT_TRUE(a->Write(Tokens({2})));
  EXPECT_TRUE(b->Write(Tokens({10})));
  EXPECT_TRUE(a->Write(Tokens({3})));
  EXPECT_TRUE(b->Finish(absl::OkStatus()));
  EXPECT_EQ(total_, 3);
  WriteDone();
  EXPECT_EQ(total_, 0);
  EXPECT_TRUE(a->Finish(WithReason(absl::AbortedError("taken over \xff"), kReasonRankLost)));
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("7:1,", "7:2, 9:10,!0 7:3,", "7:!10"));
  EXPECT_EQ(sink_.last_end.message(), "taken over \xff");
  EXPECT_THAT(sink_.last_end.details(), HasSubstr("RANK_LOST"));
  for (const auto& call : {a, b}) {
    EXPECT_FALSE(call->Write(Tokens({4})));
    EXPECT_FALSE(call->Finish(absl::OkStatus()));
  }
  EXPECT_FALSE(sink_.finished.has_value());  // the stream goes on
  EXPECT_THAT(cancelled_, IsEmpty());
}

TEST_F(MuxWriterTest, WhatWaitsOfACallIsMerged) {
  Make({.merge = Append});
  const auto a = Open(1);
  const auto b = Open(2);
  for (const std::int32_t id : {1, 2, 3}) {
    EXPECT_TRUE(a->Write(Tokens({id})));
    EXPECT_TRUE(b->Write(Tokens({10 * id})));
  }
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("1:1,", "2:10,20,30, 1:2,3,"));
}

TEST_F(MuxWriterTest, ASlowReaderLosesACallAtTheByteAfterTheLastAllowedAndThatCallAlone) {
  for (const bool merge : {false, true}) {
    Make({.max_bytes = 4, .merge = merge ? Append : nullptr});
    const auto slow = Open(1);
    const auto other = Open(2);
    EXPECT_TRUE(slow->Write(Tokens({1, 2, 3, 4, 5, 6})));  // nothing waits
    EXPECT_TRUE(slow->Write(Tokens({1, 2})));
    EXPECT_TRUE(slow->Write(Tokens({3, 4})));
    EXPECT_TRUE(other->Write(Tokens({20})));
    EXPECT_EQ(total_, 5);
    EXPECT_FALSE(slow->Write(Tokens({5})));
    EXPECT_EQ(total_, 1);
    EXPECT_FALSE(slow->Write(Tokens({6})));
    EXPECT_FALSE(slow->Finish(absl::OkStatus()));
    WriteDone();
    EXPECT_THAT(sink_.written, ElementsAre("1:1,2,3,4,5,6,", "1:!8 2:20,"));
    EXPECT_THAT(sink_.last_end.details(), HasSubstr("SLOW_READER"));
    EXPECT_TRUE(other->Write(Tokens({21})));
    EXPECT_THAT(cancelled_, IsEmpty());  // Write() has said it
    WriteDone();
  }
}

TEST_F(MuxWriterTest, AResponseLargerThanTheConnectionTakesEndsItsCallAlone) {
  const Response fits = Tokens(std::vector<std::int32_t>(1000, 1));
  const Response large = Tokens(std::vector<std::int32_t>(1001, 1));
  Make({.max_message_bytes = static_cast<std::int64_t>(fits.ByteSizeLong())});
  const auto a = Open(1);
  const auto b = Open(2);
  EXPECT_TRUE(a->Write(fits));
  WriteDone();
  EXPECT_FALSE(a->Write(large));
  WriteDone();
  EXPECT_EQ(sink_.written.back(), "1:!8");
  EXPECT_TRUE(b->Write(fits));
}

// 3 x 100 KiB of one call before one token of another.
TEST_F(MuxWriterTest, CallsTakeTurnsWhenAMessageIsFull) {
  Make({});
  const Response large = Tokens(std::vector<std::int32_t>(100 << 10, 1));
  const auto a = Open(1);
  const auto b = Open(2);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(a->Write(large));
  EXPECT_TRUE(b->Write(Tokens({2})));
  WriteDone();
  EXPECT_THAT(sink_.written.back(), HasSubstr(" 2:2,"));
  EXPECT_LT(sink_.bytes.back(), std::size_t{360} << 10);
  WriteDone();
  EXPECT_FALSE(sink_.written.back().empty());
}

TEST_F(MuxWriterTest, ACancelledCallSaysNothingMoreAndItsProducerIsToldOnce) {
  Make({});
  const auto a = Open(1);
  const auto b = Open(2);
  EXPECT_TRUE(b->Write(Tokens({1})));
  EXPECT_TRUE(a->Write(Tokens({2})));
  EXPECT_TRUE(b->Write(Tokens({3})));
  mux_->Cancel(1);
  mux_->Cancel(1);
  mux_->Cancel(99);
  EXPECT_THAT(cancelled_, ElementsAre(1));
  EXPECT_EQ(total_, 1);
  EXPECT_FALSE(a->Write(Tokens({4})));
  EXPECT_FALSE(a->Finish(absl::OkStatus()));
  EXPECT_TRUE(b->Finish(absl::OkStatus()));
  mux_->Cancel(2);  // its producer has finished
  EXPECT_THAT(cancelled_, ElementsAre(1));
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("2:1,"));
  EXPECT_NE(Open(1), nullptr);  // the number is free
}

TEST_F(MuxWriterTest, TheEndOfTheStreamTellsEveryProducerAndComesBehindTheWriteInFlight) {
  Make({});
  const auto a = Open(1);
  const auto b = Open(2);
  const auto c = Open(3);
  EXPECT_TRUE(a->Write(Tokens({1})));
  EXPECT_TRUE(b->Write(Tokens({2})));
  EXPECT_TRUE(c->Finish(absl::OkStatus()));
  mux_->End(absl::CancelledError("gone"));
  mux_->End(absl::InternalError("later"));
  EXPECT_THAT(cancelled_, ::testing::UnorderedElementsAre(1, 2));
  EXPECT_EQ(total_, 0);
  EXPECT_EQ(Open(4), nullptr);
  EXPECT_FALSE(a->Write(Tokens({3})));
  EXPECT_FALSE(sink_.finished.has_value());
  WriteDone(false);
  EXPECT_EQ(sink_.finished, absl::CancelledError("gone"));
  mux_->OnDone();
  EXPECT_FALSE(b->Finish(absl::OkStatus()));
  EXPECT_THAT(sink_.written, ElementsAre("1:1,"));
}

TEST_F(MuxWriterTest, AFailedWriteEndsTheStream) {
  Make({});
  const auto a = Open(1);
  EXPECT_TRUE(a->Write(Tokens({1})));
  WriteDone(false);
  EXPECT_THAT(cancelled_, ElementsAre(1));
  ASSERT_TRUE(sink_.finished.has_value());
}

TEST_F(MuxWriterTest, ANumberThatIsTakenEndsTheStream) {
  Make({});
  const auto a = Open(1);
  EXPECT_EQ(Open(1), nullptr);
  EXPECT_THAT(cancelled_, ElementsAre(1));  // the first one
  ASSERT_TRUE(sink_.finished.has_value());
  EXPECT_TRUE(absl::IsInvalidArgument(*sink_.finished));
}

// A drain waits for writers to go: one does when its end has been taken, not before.
TEST_F(MuxWriterTest, ACallLivesUntilItsEndHasGoneOut) {
  Make({});
  const auto alive = std::make_shared<int>(0);
  auto call = mux_->Open(1, [alive] {});
  EXPECT_TRUE(call->Finish(absl::OkStatus()));
  call = nullptr;
  EXPECT_EQ(alive.use_count(), 2);
  WriteDone();
  EXPECT_EQ(alive.use_count(), 1);
}

// --- The storm: producers, cancels and the transport on threads of their own.

// Answers each write from a thread of its own, and checks that every call's tokens are 0, 1, 2, ...
class StormSink final : public StreamSink<v1::GenerateEvents> {
 public:
  explicit StormSink(std::size_t num_calls) : next_(num_calls), ended_(num_calls) {}
  ~StormSink() override { thread_.join(); }
  void Run(std::shared_ptr<MuxWriter> mux) {
    thread_ = std::thread([this, mux = std::move(mux)] {
      while (!finished_) {
        if (writing_.exchange(false)) {
          mux->OnWriteDone(true);
        } else {
          std::this_thread::yield();
        }
      }
      mux->OnDone();
    });
  }
  bool Ended(std::size_t call) const { return ended_[call]; }

 private:
  void StartWrite(const v1::GenerateEvents& message) override {
    for (const v1::GenerateEvent& event : message.events()) {
      EXPECT_FALSE(ended_[event.call()]);
      for (const std::int32_t id : event.response().token_ids()) {
        EXPECT_EQ(id, next_[event.call()]++);
      }
      ended_[event.call()] = event.has_end();
    }
    EXPECT_FALSE(writing_.exchange(true));
  }
  void Finish(const absl::Status&) override {
    EXPECT_FALSE(writing_);
    EXPECT_FALSE(finished_.exchange(true));
  }

  std::vector<std::int32_t> next_;
  std::vector<std::atomic<bool>> ended_;
  std::atomic<bool> writing_ = false;
  std::atomic<bool> finished_ = false;
  std::thread thread_;
};

TEST(MuxWriterStormTest, EveryCallIsWholeOrCancelledWhateverRacesWithWhat) {
  constexpr std::size_t kCalls = 400;
  constexpr int kTokens = 20;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::vector<std::atomic<int>> cancels(kCalls);
  std::vector<std::atomic<bool>> finished(kCalls);
  std::vector<std::atomic<bool>> to_cancel(kCalls);
  StormSink sink(kCalls);
  const auto mux =
      std::make_shared<MuxWriter>(sink, MuxWriterOptions{.size_bytes = NumTokens, .merge = Append});
  sink.Run(mux);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::minstd_rand random(seed + t);
      for (std::size_t call = t; call < kCalls; call += 4) {
        to_cancel[call] = random() % 3 == 0;
        const auto writer = mux->Open(call, [&cancels, call] { ++cancels[call]; });
        for (int id = 0; id < kTokens && writer->Write(Tokens({id})); ++id) {
          if (random() % 8 == 0) std::this_thread::yield();
        }
        finished[call] = writer->Finish(absl::OkStatus());
      }
    });
  }
  std::thread canceller([&] {
    std::minstd_rand random(seed);
    for (int i = 0; i < 20000; ++i) {
      const std::size_t call = random() % kCalls;
      if (to_cancel[call]) mux->Cancel(call);
    }
  });
  for (std::thread& thread : threads) thread.join();
  canceller.join();
  for (std::size_t call = 0; call < kCalls; ++call) {
    EXPECT_LE(cancels[call], 1) << call;
    EXPECT_NE(cancels[call] == 1, finished[call]) << call;
    if (to_cancel[call]) continue;
    while (!sink.Ended(call)) std::this_thread::yield();  // else the test times out
  }
  mux->End(absl::OkStatus());
}

}  // namespace
}  // namespace weft
