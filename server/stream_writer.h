#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "server/base/check.h"
#include "server/base/mutex.h"
#include "server/error_reason.h"

namespace weft {

// What StreamWriter needs of a transport. gRPC's is in grpc_stream.h; tests have their own.
//
// The transport answers every StartWrite() with one StreamWriter::OnWriteDone(), from any thread,
// also from inside StartWrite(). It calls OnCancel() when the reader has gone or given up, at any
// time, and OnDone() as its last call, after Finish() and all answers.
template <typename T>
class StreamSink {
 public:
  virtual ~StreamSink() = default;
  // `message` stays as it is until OnWriteDone(). Never called while a write is in flight.
  virtual void StartWrite(const T& message) = 0;
  // Called exactly once, with no write in flight, as the last call.
  virtual void Finish(const absl::Status& status) = 0;
};

template <typename T>
struct StreamWriterOptions {
  // What may wait behind the write in flight; one more ends the stream with RESOURCE_EXHAUSTED.
  std::size_t max_messages = 256;
  std::int64_t max_bytes = std::int64_t{1} << 20;
  std::int64_t (*size_bytes)(const T&) = nullptr;  // counts a message towards max_bytes; required
  // Appends `next` to the waiting message `into` and returns true, or returns false and leaves both
  // alone. Tried from the newest waiting message on: where messages of several sources share a
  // stream, each source's stay in order. Null: messages are never merged. Runs under the stream's
  // lock.
  bool (*merge)(T& into, T& next) = nullptr;
  // Told once when the transport ends the stream before the producer's Finish(): the reader
  // cancelled, vanished or hit its deadline. Runs on a thread of the transport, never inside
  // Write() or Finish(), so that the producer may hold its locks there. Never runs when Finish()
  // has returned true, but may still be about to run when Write() or Finish() has returned false:
  // capture what outlives the call.
  std::function<void()> on_cancel;
  // If not null, has what waits in this stream added to it, as it changes; for the metrics of a
  // process. Outlives the stream.
  std::atomic<std::int64_t>* total_buffered_bytes = nullptr;
};

// THE streaming logic: takes messages from a producer that never waits, and hands them to a
// transport that takes one at a time. While a write is in flight, new messages are merged into the
// last one that waits, or wait behind it. A reader who lets more than the limits pile up loses
// this stream, and costs nobody else anything.
//
// Thread-safe: the producer's calls and the transport's may come from any threads at once. Neither
// the transport nor on_cancel is called with the lock held.
// Ownership: shared by the producer and the transport (std::shared_ptr). The sink must live until
// it gets to call OnDone(); it is not touched afterwards, however long the producer holds on.
template <typename T>
class StreamWriter {
 public:
  StreamWriter(StreamSink<T>& sink, StreamWriterOptions<T> options)
      : sink_(sink), options_(std::move(options)) {
    CHECK(options_.size_bytes != nullptr && options_.max_messages > 0);
  }
  ~StreamWriter() { SetWaitingBytes(0); }
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  // --- The producer's side.

  // False when the stream has ended, also because this message is one too many for a slow reader:
  // it is dropped, and the producer has to stop. One source's messages come from one thread at a
  // time; several sources may write at once.
  bool Write(T message);
  // Ends the stream with `status` after everything written has gone out. False when the stream had
  // ended before.
  bool Finish(absl::Status status);

  // --- The transport's side.

  // The write in flight is over; `ok` is false when the connection is gone.
  void OnWriteDone(bool ok);
  void OnCancel();
  void OnDone();

  // What waits; for tests and metrics.
  std::int64_t buffered_bytes() const {
    MutexLock lock(mutex_);
    return waiting_bytes_;
  }

 private:
  enum class State {
    kOpen,
    kFlushing,  // the producer has finished; the rest goes out first
    kFinished,  // sink_.Finish() is called, or will be as soon as no write is in flight
    kDone,      // the sink is gone
  };
  // What to do once the lock is released. At most one thread at a time has one: a write keeps
  // writing_ true, and a finish is taken once.
  struct Action {
    const T* write = nullptr;
    std::optional<absl::Status> finish;
    bool tell_producer = false;
  };

  void SetWaitingBytes(std::int64_t bytes) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (options_.total_buffered_bytes != nullptr && bytes != waiting_bytes_) {
      options_.total_buffered_bytes->fetch_add(bytes - waiting_bytes_, std::memory_order_relaxed);
    }
    waiting_bytes_ = bytes;
  }
  void Buffer(T message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops what waits and ends the stream, whatever state it is in.
  void Abort(absl::Status status, Action& action) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts the next write or the finish if it is time.
  void Advance(Action& action) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(Action action) ABSL_LOCKS_EXCLUDED(mutex_);

  StreamSink<T>& sink_;
  const StreamWriterOptions<T> options_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kOpen;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finish_taken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // of kFlushing and kFinished
  T in_flight_;  // written under the lock while !writing_; the sink's while writing_
  std::deque<T> waiting_ ABSL_GUARDED_BY(mutex_);
  std::int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

template <typename T>
bool StreamWriter<T>::Write(T message) {
  Action action;
  bool open = false;
  {
    MutexLock lock(mutex_);
    if (state_ != State::kOpen) return false;
    Buffer(std::move(message));
    Advance(action);
    // What a free transport takes at once does not count as waiting.
    open = waiting_.size() <= options_.max_messages && waiting_bytes_ <= options_.max_bytes;
    if (!open) {
      Abort(WithReason(absl::ResourceExhaustedError("the reader is too slow for this stream"),
                       kReasonSlowReader),
            action);
      action.tell_producer = false;  // it learns it from us
    }
  }
  Perform(std::move(action));
  return open;
}

template <typename T>
bool StreamWriter<T>::Finish(absl::Status status) {
  Action action;
  {
    MutexLock lock(mutex_);
    if (state_ != State::kOpen) return false;
    state_ = State::kFlushing;
    status_ = std::move(status);
    Advance(action);
  }
  Perform(std::move(action));
  return true;
}

template <typename T>
void StreamWriter<T>::OnWriteDone(bool ok) {
  Action action;
  {
    MutexLock lock(mutex_);
    CHECK(writing_);
    writing_ = false;
    if (!ok) Abort(absl::CancelledError("the connection is gone"), action);
    Advance(action);
    if (!writing_) in_flight_ = T();  // a long prompt is not kept for as long as its request runs
  }
  Perform(std::move(action));
}

template <typename T>
void StreamWriter<T>::OnCancel() {
  Action action;
  {
    MutexLock lock(mutex_);
    Abort(absl::CancelledError("cancelled by the reader"), action);
    Advance(action);
  }
  Perform(std::move(action));
}

template <typename T>
void StreamWriter<T>::OnDone() {
  MutexLock lock(mutex_);
  CHECK(finish_taken_ && !writing_);
  state_ = State::kDone;
}

template <typename T>
void StreamWriter<T>::Buffer(T message) {
  if (options_.merge != nullptr) {
    for (auto into = waiting_.rbegin(); into != waiting_.rend(); ++into) {
      const std::int64_t before = options_.size_bytes(*into);
      if (options_.merge(*into, message)) {
        SetWaitingBytes(waiting_bytes_ + options_.size_bytes(*into) - before);
        return;
      }
    }
  }
  SetWaitingBytes(waiting_bytes_ + options_.size_bytes(message));
  waiting_.push_back(std::move(message));
}

template <typename T>
void StreamWriter<T>::Abort(absl::Status status, Action& action) {
  if (state_ == State::kFinished || state_ == State::kDone) return;
  action.tell_producer = state_ == State::kOpen && options_.on_cancel != nullptr;
  state_ = State::kFinished;
  status_ = std::move(status);
  waiting_.clear();
  SetWaitingBytes(0);
}

template <typename T>
void StreamWriter<T>::Advance(Action& action) {
  if (writing_ || finish_taken_) return;
  if (!waiting_.empty()) {
    in_flight_ = std::move(waiting_.front());
    waiting_.pop_front();
    SetWaitingBytes(waiting_bytes_ - options_.size_bytes(in_flight_));
    writing_ = true;
    action.write = &in_flight_;
    return;
  }
  if (state_ == State::kFlushing) state_ = State::kFinished;
  if (state_ == State::kFinished) {
    finish_taken_ = true;
    action.finish = status_;
  }
}

template <typename T>
void StreamWriter<T>::Perform(Action action) {
  // The producer first: after sink_.Finish() the sink's owner may drop its reference to us.
  if (action.tell_producer) options_.on_cancel();
  if (action.write != nullptr) sink_.StartWrite(*action.write);
  if (action.finish.has_value()) sink_.Finish(*action.finish);
}

}  // namespace weft
