#include "server/stream_writer.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/manual_sink.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::int64_t SizeOf(const std::string& text) { return static_cast<std::int64_t>(text.size()); }
bool Append(std::string& into, std::string& next) {
  if (next.starts_with('|')) return false;
  into += next;
  return true;
}

struct RecordingSink : ManualSink<std::string> {
  void StartWrite(const std::string& message) override {
    ManualSink::StartWrite(message);
    written.push_back(message);
  }
  std::vector<std::string> written;
};

class StreamWriterTest : public ::testing::Test {
 protected:
  StreamWriter<std::string>& Make(std::size_t max_messages = 100, std::int64_t max_bytes = 1000,
                                  bool merge = false) {
    writer_.emplace(sink_, StreamWriterOptions<std::string>{.max_messages = max_messages,
                                                            .max_bytes = max_bytes,
                                                            .size_bytes = SizeOf,
                                                            .merge = merge ? Append : nullptr,
                                                            .on_cancel = [this] { ++cancels_; }});
    return *writer_;
  }
  void WriteDone(bool ok = true) {
    ASSERT_TRUE(sink_.writing);
    sink_.writing = false;
    writer_->OnWriteDone(ok);
  }

  RecordingSink sink_;
  std::optional<StreamWriter<std::string>> writer_;
  int cancels_ = 0;
};

TEST_F(StreamWriterTest, ATotalFollowsWhatWaitsInAllStreams) {
  std::atomic<std::int64_t> total = 0;
  const auto options = [&total] {
    return StreamWriterOptions<std::string>{
        .size_bytes = SizeOf, .merge = Append, .total_buffered_bytes = &total};
  };
  RecordingSink sinks[3];
  StreamWriter<std::string> drained(sinks[0], options());
  StreamWriter<std::string> cancelled(sinks[1], options());
  std::optional<StreamWriter<std::string>> dropped(std::in_place, sinks[2], options());
  for (StreamWriter<std::string>* writer : {&drained, &cancelled, &*dropped}) {
    writer->Write("in flight");
    writer->Write("four");
    writer->Write("more");    // merged
    writer->Write("|other");  // not
  }
  EXPECT_EQ(total, 3 * 14);
  sinks[0].writing = false;
  drained.OnWriteDone(true);
  EXPECT_EQ(total, 2 * 14 + 6);
  cancelled.OnCancel();
  EXPECT_EQ(total, 14 + 6);
  dropped.reset();
  EXPECT_EQ(total, 6);
}

TEST_F(StreamWriterTest, WritesOneAtATimeInOrderAndFinishesLast) {
  StreamWriter<std::string>& writer = Make();
  EXPECT_TRUE(writer.Write("a"));
  EXPECT_TRUE(writer.Write("b"));
  EXPECT_TRUE(writer.Write("c"));
  EXPECT_TRUE(writer.Finish(absl::UnavailableError("x")));
  EXPECT_THAT(sink_.written, ElementsAre("a"));
  WriteDone();
  WriteDone();
  EXPECT_FALSE(sink_.finished.has_value());
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("a", "b", "c"));
  EXPECT_EQ(sink_.finished, absl::UnavailableError("x"));
  writer.OnDone();
  EXPECT_EQ(cancels_, 0);
}

TEST_F(StreamWriterTest, MergesIntoTheNewestWaitingMessageThatTakesIt) {
  StreamWriter<std::string>& writer = Make(100, 1000, true);
  for (const char* text : {"a", "b", "c", "|d", "e"}) EXPECT_TRUE(writer.Write(text));
  EXPECT_EQ(writer.buffered_bytes(), 5);
  WriteDone();
  EXPECT_TRUE(writer.Write("f"));
  WriteDone();
  WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("a", "bc", "|def"));
  EXPECT_EQ(writer.buffered_bytes(), 0);
  EXPECT_TRUE(writer.Finish(absl::OkStatus()));
  EXPECT_EQ(sink_.finished, absl::OkStatus());
}

// Messages of several sources, told apart by their first letter.
TEST_F(StreamWriterTest, EachSourcesMessagesStayInOrderAndOneOfEachWaits) {
  for (const std::size_t max_messages : {2, 3}) {
    sink_ = {};
    writer_.emplace(
        sink_, StreamWriterOptions<std::string>{.max_messages = max_messages,
                                                .size_bytes = SizeOf,
                                                .merge = [](std::string& into, std::string& next) {
                                                  if (into[0] != next[0]) return false;
                                                  into += next.substr(1);
                                                  return true;
                                                }});
    for (const char* text : {"a1", "a2", "b1", "a3", "b2", "a4"}) {
      EXPECT_TRUE(writer_->Write(text));
    }
    EXPECT_EQ(writer_->Write("c1"), max_messages == 3);
  }
  for (int i = 0; i < 3; ++i) WriteDone();
  EXPECT_THAT(sink_.written, ElementsAre("a1", "a234", "b12", "c1"));
}

// The producer may hold its locks in Write().
TEST_F(StreamWriterTest, NothingOfTheProducersRunsInsideWrite) {
  Mutex mutex;
  writer_.emplace(sink_, StreamWriterOptions<std::string>{
                             .max_messages = 1, .size_bytes = SizeOf, .on_cancel = [&mutex] {
                               MutexLock lock(mutex);
                             }});
  MutexLock lock(mutex);
  EXPECT_TRUE(writer_->Write("in flight"));
  EXPECT_TRUE(writer_->Write("1"));
  EXPECT_FALSE(writer_->Write("2"));
}

TEST_F(StreamWriterTest, ASlowReaderIsCutOffAtTheMessageAfterTheLastAllowed) {
  StreamWriter<std::string>& writer = Make(2, 1000);
  EXPECT_TRUE(writer.Write("in flight"));
  EXPECT_TRUE(writer.Write("1"));
  EXPECT_TRUE(writer.Write("2"));
  EXPECT_FALSE(writer.Write("3"));
  EXPECT_EQ(cancels_, 0);  // Write() has said it
  EXPECT_EQ(writer.buffered_bytes(), 0);
  EXPECT_FALSE(writer.Write("4"));
  EXPECT_FALSE(writer.Finish(absl::OkStatus()));
  EXPECT_FALSE(sink_.finished.has_value());
  WriteDone();
  ASSERT_TRUE(sink_.finished.has_value());
  EXPECT_EQ(sink_.finished->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(*sink_.finished), kReasonSlowReader);
  EXPECT_THAT(sink_.written, ElementsAre("in flight"));
  EXPECT_EQ(cancels_, 0);
}

TEST_F(StreamWriterTest, ASlowReaderIsCutOffAtTheByteAfterTheLastAllowedMergedOrNot) {
  for (const bool merge : {false, true}) {
    sink_ = {};
    cancels_ = 0;
    StreamWriter<std::string>& writer = Make(100, 4, merge);
    EXPECT_TRUE(writer.Write("as long as it likes"));  // nothing waits
    EXPECT_TRUE(writer.Write("12"));
    EXPECT_TRUE(writer.Write("34"));
    EXPECT_EQ(writer.buffered_bytes(), 4);
    EXPECT_FALSE(writer.Write("5"));
    WriteDone();
    EXPECT_EQ(sink_.finished->code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(StreamWriterTest, CancelDropsWhatWaitsTellsTheProducerOnceAndFinishesOnce) {
  StreamWriter<std::string>& writer = Make();
  EXPECT_TRUE(writer.Write("a"));
  EXPECT_TRUE(writer.Write("b"));
  writer.OnCancel();
  writer.OnCancel();
  EXPECT_EQ(cancels_, 1);
  EXPECT_FALSE(writer.Write("c"));
  EXPECT_FALSE(sink_.finished.has_value());
  WriteDone(false);
  EXPECT_EQ(sink_.finished->code(), absl::StatusCode::kCancelled);
  writer.OnCancel();
  writer.OnDone();
  EXPECT_FALSE(writer.Finish(absl::OkStatus()));
  EXPECT_FALSE(writer.Write("d"));
  EXPECT_THAT(sink_.written, ElementsAre("a"));
  EXPECT_EQ(cancels_, 1);
}

TEST_F(StreamWriterTest, CancelOfAnIdleStreamFinishesItAtOnce) {
  StreamWriter<std::string>& writer = Make();
  writer.OnCancel();
  ASSERT_TRUE(sink_.finished.has_value());
  EXPECT_EQ(cancels_, 1);
}

TEST_F(StreamWriterTest, AFailedWriteEndsTheStreamLikeACancel) {
  StreamWriter<std::string>& writer = Make();
  EXPECT_TRUE(writer.Write("a"));
  EXPECT_TRUE(writer.Write("b"));
  WriteDone(false);
  ASSERT_TRUE(sink_.finished.has_value());
  EXPECT_THAT(sink_.written, ElementsAre("a"));
  EXPECT_EQ(cancels_, 1);
}

TEST_F(StreamWriterTest, CancelAfterTheProducerFinishedDropsTheRestAndTellsNobody) {
  StreamWriter<std::string>& writer = Make();
  EXPECT_TRUE(writer.Write("a"));
  EXPECT_TRUE(writer.Write("b"));
  EXPECT_TRUE(writer.Finish(absl::OkStatus()));
  writer.OnCancel();
  WriteDone(false);
  EXPECT_EQ(sink_.finished->code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(sink_.written, ElementsAre("a"));
  EXPECT_EQ(cancels_, 0);
}

// A transport whose writes complete inside StartWrite() gets the whole stream without deadlock.
TEST(StreamWriterInlineTest, AWriteMayCompleteInsideStartWrite) {
  struct InlineSink : StreamSink<std::string> {
    void StartWrite(const std::string& message) override {
      written.push_back(message);
      writer->OnWriteDone(true);
    }
    void Finish(const absl::Status&) override {
      ++finishes;
      writer->OnDone();
    }
    StreamWriter<std::string>* writer = nullptr;
    std::vector<std::string> written;
    int finishes = 0;
  } sink;
  StreamWriter<std::string> writer(sink, {.size_bytes = SizeOf});
  sink.writer = &writer;
  EXPECT_TRUE(writer.Write("a"));
  EXPECT_TRUE(writer.Write("b"));
  EXPECT_TRUE(writer.Finish(absl::OkStatus()));
  EXPECT_THAT(sink.written, ElementsAre("a", "b"));
  EXPECT_EQ(sink.finishes, 1);
}

// --- The storm.

// Threads that run what they are given, in any order.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
  }
  // Runs everything given so far and by what runs.
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Run(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      work_.push(std::move(work));
    }
    wake_.notify_one();
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (!work_.empty()) {
        std::function<void()> work = std::move(work_.front());
        work_.pop();
        ++running_;
        lock.unlock();
        work();
        lock.lock();
        --running_;
      } else if (closing_ && running_ == 0) {
        wake_.notify_all();
        return;
      } else {
        wake_.wait(lock);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> work_;
  int running_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

struct Tally {
  std::atomic<int> finishes = 0;
  std::atomic<int> completed = 0;
  std::atomic<int> cancels = 0;
  std::atomic<int> producer_finishes = 0;
  std::atomic<int> slow = 0;
};

// One stream of the storm; deletes itself in OnDone like a gRPC reactor.
class StormStream : public StreamSink<std::string> {
 public:
  StormStream(Pool& pool, Tally& tally, std::uint32_t seed)
      : pool_(pool), tally_(tally), seed_(seed), fails_at_(seed % 7 == 0 ? seed % 5 : 1000) {
    writer_ = std::make_shared<StreamWriter<std::string>>(
        *this, StreamWriterOptions<std::string>{.max_messages = 3,
                                                .max_bytes = 64,
                                                .size_bytes = SizeOf,
                                                .merge = seed % 2 == 0 ? Append : nullptr,
                                                .on_cancel = [this] {
                                                  ++cancels_;
                                                  ++tally_.cancels;
                                                }});
  }

  static void Start(Pool& pool, Tally& tally, std::uint32_t seed) {
    auto* stream = new StormStream(pool, tally, seed);
    std::shared_ptr<StreamWriter<std::string>> writer = stream->writer_;
    // The end of the call is the transport's own, after the producer and the canceller are done
    // with the stream: gRPC holds on for its reactions in the same way.
    stream->users_ = 1;
    const bool cancels = seed % 3 == 0;
    if (cancels) stream->users_ += 2;
    pool.Run([stream, writer, &tally, seed] {
      Produce(*writer, tally, seed);
      stream->Release();
    });
    for (int i = 0; cancels && i < 2; ++i) {
      pool.Run([stream, writer] {
        writer->OnCancel();
        stream->Release();
      });
    }
  }

 private:
  static void Produce(StreamWriter<std::string>& writer, Tally& tally, std::uint32_t seed) {
    std::minstd_rand random(seed);
    const int messages = static_cast<int>(random() % 8);
    for (int i = 0; i < messages; ++i) {
      if (!writer.Write(std::string(1, static_cast<char>('a' + i)))) return;
      if (random() % 4 == 0) std::this_thread::yield();
    }
    if (writer.Finish(absl::OkStatus())) ++tally.producer_finishes;
  }

  void StartWrite(const std::string& message) override {
    EXPECT_FALSE(in_flight_.exchange(true));
    EXPECT_FALSE(finished_);
    for (const char c : message) {
      EXPECT_EQ(c, next_++) << "seed " << seed_;  // nothing lost, repeated or swapped
    }
    const bool ok = writes_++ < fails_at_;
    pool_.Run([this, writer = writer_, ok] {
      in_flight_ = false;
      writer->OnWriteDone(ok);
    });
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(in_flight_);
    EXPECT_FALSE(finished_.exchange(true)) << "seed " << seed_;
    ++tally_.finishes;
    if (status.ok()) ++tally_.completed;
    if (absl::IsResourceExhausted(status)) ++tally_.slow;
    EXPECT_LE(cancels_, 1) << "seed " << seed_;
    Release();
  }
  // The last of producer, cancellers and Finish() ends the call.
  void Release() {
    const int users = users_;  // after the next line we may be gone
    if (released_.fetch_add(1) != users) return;
    pool_.Run([this] {
      writer_->OnDone();
      delete this;
    });
  }

  Pool& pool_;
  Tally& tally_;
  const std::uint32_t seed_;
  const int fails_at_;
  int users_ = 0;
  int writes_ = 0;
  char next_ = 'a';
  std::atomic<int> released_ = 0;
  std::atomic<int> cancels_ = 0;
  std::atomic<bool> in_flight_ = false;
  std::atomic<bool> finished_ = false;
  std::shared_ptr<StreamWriter<std::string>> writer_;
};

TEST(StreamWriterStormTest, EveryStreamFinishesOnceWhateverRacesWithWhat) {
  constexpr int kStreams = 10000;
  const std::uint32_t first_seed = std::random_device()();
  SCOPED_TRACE(first_seed);
  Tally tally;
  {
    Pool pool(4);
    for (int i = 0; i < kStreams; ++i) StormStream::Start(pool, tally, first_seed + i);
  }
  EXPECT_EQ(tally.finishes, kStreams);
  // The producer ended it, was told, or learnt it from Write(): exactly one of them.
  EXPECT_EQ(tally.producer_finishes + tally.cancels + tally.slow, kStreams);
  // The storm has reached every end.
  EXPECT_GT(tally.completed, 0);
  EXPECT_GT(tally.cancels, 0);
  EXPECT_LE(tally.completed, tally.producer_finishes);
}

}  // namespace
}  // namespace weft
