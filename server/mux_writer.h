#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"
#include "server/stream_writer.h"
#include "weft/v1/worker.pb.h"

namespace weft {

class MuxWriter;

// The producer's end of one call of a MuxWriter. Thread-safe, and outlives the stream.
class CallWriter {
 public:
  // As StreamWriter's: false when the call has ended, also because this message is one too many for
  // a slow reader; then the producer has to stop.
  bool Write(v1::WorkerGenerateResponse response);
  // Ends the call with `status` after everything written has gone out. False when it had ended
  // before.
  bool Finish(absl::Status status);

 private:
  friend class MuxWriter;
  enum class State {
    kOpen,
    kFlushing,  // the producer has finished; the rest goes out first
    kEnded,     // nothing more goes out
  };

  CallWriter(std::shared_ptr<MuxWriter> mux, std::uint64_t call, std::function<void()> on_cancel)
      : mux_(std::move(mux)), call_(call), on_cancel_(std::move(on_cancel)) {}

  const std::shared_ptr<MuxWriter> mux_;
  const std::uint64_t call_;
  const std::function<void()> on_cancel_;

  // The rest is under the lock of mux_.
  State state_ = State::kOpen;
  absl::Status status_;  // of kFlushing
  std::deque<v1::WorkerGenerateResponse> waiting_;
  std::int64_t waiting_bytes_ = 0;
  bool ready_ = false;  // in MuxWriter::ready_
};

struct MuxWriterOptions {
  // What may wait of one call behind the write in flight; more ends it with RESOURCE_EXHAUSTED.
  std::int64_t max_bytes = std::int64_t{1} << 20;
  // A response that is larger than the connection takes ends its call likewise.
  std::int64_t max_message_bytes = (std::int64_t{64} << 20) - 1024;
  // As StreamWriterOptions'.
  std::int64_t (*size_bytes)(const v1::WorkerGenerateResponse&) = nullptr;
  bool (*merge)(v1::WorkerGenerateResponse& into, v1::WorkerGenerateResponse& next) = nullptr;
  std::atomic<std::int64_t>* total_buffered_bytes = nullptr;
};

// The leader's end of one Worker.Generate stream: what its calls have to say goes out in messages
// of all that waits, one at a time. A call's messages stay in order; while a write is in flight,
// the newer ones are merged. What is kept for a reader that does not read is bounded for each call,
// so that none costs another anything.
//
// Thread-safe: producers and the transport, which is a StreamSink's, may call from any threads at
// once. Neither the transport nor on_cancel is called with the lock held.
// Ownership: shared by the transport and the calls. The sink must live until it gets to call
// OnDone().
class MuxWriter : public std::enable_shared_from_this<MuxWriter> {
 public:
  MuxWriter(StreamSink<v1::GenerateEvents>& sink, MuxWriterOptions options);
  ~MuxWriter();
  MuxWriter(const MuxWriter&) = delete;
  MuxWriter& operator=(const MuxWriter&) = delete;

  // Null when the stream has ended; a number that is taken ends it. `on_cancel`, which may be null,
  // is told once when the call ends before the producer's Finish(): the reader cancelled it, or the
  // stream ended. It runs on a thread of the transport, perhaps before this returns, never when
  // Finish() has returned true; capture what outlives the call.
  std::shared_ptr<CallWriter> Open(std::uint64_t call, std::function<void()> on_cancel);

  // --- The transport's side.

  // The reader does not want to hear of it any more.
  void Cancel(std::uint64_t call);
  // Ends the stream and all calls; what waits is dropped. The first status counts.
  void End(absl::Status status);
  void OnWriteDone(bool ok);
  void OnDone();

 private:
  friend class CallWriter;
  using CallPtr = std::shared_ptr<CallWriter>;

  // What to do once the lock is released; at most one thread at a time has a write or the finish.
  struct Action {
    std::vector<CallPtr> cancelled;  // whose producers are told
    const v1::GenerateEvents* write = nullptr;
    std::optional<absl::Status> finish;
  };

  bool Write(CallWriter& call, v1::WorkerGenerateResponse response);
  bool Finish(CallWriter& call, absl::Status status);
  void Buffer(CallWriter& call, v1::WorkerGenerateResponse response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetWaitingBytes(CallWriter& call, std::int64_t bytes);
  void DropWaiting(CallWriter& call);
  // Lets it have its turn in a message.
  void MakeReady(CallWriter& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing of it goes out any more.
  void Remove(CallPtr call, Action& action) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillEvent(const CallPtr& call, v1::GenerateEvent& event)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked(absl::Status status, Action& action) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts the next write or the finish if it is time.
  void Advance(Action& action) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(const Action& action) ABSL_LOCKS_EXCLUDED(mutex_);

  StreamSink<v1::GenerateEvents>& sink_;
  const MuxWriterOptions options_;

  Mutex mutex_;
  absl::flat_hash_map<std::uint64_t, CallPtr> calls_
      ABSL_GUARDED_BY(mutex_);                               // that have not ended
  std::deque<CallPtr> ready_ ABSL_GUARDED_BY(mutex_);        // which have something to say
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);  // of the stream
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finish_taken_ ABSL_GUARDED_BY(mutex_) = false;
  v1::GenerateEvents in_flight_;  // written under the lock while !writing_; else the sink's
  std::vector<CallPtr> ending_ ABSL_GUARDED_BY(mutex_);  // whose end is in flight
};

}  // namespace weft
