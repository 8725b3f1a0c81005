#include "server/mux_writer.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/error_reason.h"
#include "server/grpc_status.h"

namespace weft {
namespace {

// A message takes no more once it is as large: the rest has its turn in the next one.
constexpr std::size_t kFullMessageBytes = std::size_t{256} << 10;

void FillEnd(const absl::Status& status, v1::GenerateEnd& end) {
  const grpc::Status out = ToGrpcStatus(status);
  end.set_code(out.error_code());
  end.set_message(out.error_message());
  end.set_details(out.error_details());
}

}  // namespace

bool CallWriter::Write(v1::WorkerGenerateResponse response) {
  return mux_->Write(*this, std::move(response));
}

bool CallWriter::Finish(absl::Status status) { return mux_->Finish(*this, std::move(status)); }

MuxWriter::MuxWriter(StreamSink<v1::GenerateEvents>& sink, MuxWriterOptions options)
    : sink_(sink), options_(options) {
  CHECK(options_.size_bytes != nullptr);
}
MuxWriter::~MuxWriter() = default;

std::shared_ptr<CallWriter> MuxWriter::Open(std::uint64_t call, std::function<void()> on_cancel) {
  Action action;
  CallPtr opened;
  {
    MutexLock lock(mutex_);
    if (end_.has_value()) return nullptr;
    CallPtr fresh(new CallWriter(shared_from_this(), call, std::move(on_cancel)));
    if (calls_.emplace(call, fresh).second) {
      opened = std::move(fresh);
    } else {
      EndLocked(absl::InvalidArgumentError(fmt::format("call {} runs already", call)), action);
      Advance(action);
    }
  }
  Perform(action);
  return opened;
}

bool MuxWriter::Write(CallWriter& call, v1::WorkerGenerateResponse response) {
  // Few are so large that it is worth to look closer.
  const bool too_large =
      options_.size_bytes(response) > options_.max_message_bytes / 64 &&
      static_cast<std::int64_t>(response.ByteSizeLong()) > options_.max_message_bytes;
  Action action;
  bool open = false;
  {
    MutexLock lock(mutex_);
    if (call.state_ != CallWriter::State::kOpen) return false;
    if (!too_large) {
      Buffer(call, std::move(response));
      Advance(action);
      // What a free transport takes at once does not count as waiting.
      open = call.waiting_bytes_ <= options_.max_bytes;
    }
    if (!open) {
      DropWaiting(call);
      call.state_ = CallWriter::State::kFlushing;
      call.status_ =
          too_large
              ? absl::ResourceExhaustedError(
                    fmt::format("a message is larger than the {} bytes that a connection takes",
                                options_.max_message_bytes))
              : WithReason(absl::ResourceExhaustedError("the reader is too slow for this stream"),
                           kReasonSlowReader);
      MakeReady(call);
      Advance(action);
    }
  }
  Perform(action);
  return open;
}

bool MuxWriter::Finish(CallWriter& call, absl::Status status) {
  Action action;
  {
    MutexLock lock(mutex_);
    if (call.state_ != CallWriter::State::kOpen) return false;
    call.state_ = CallWriter::State::kFlushing;
    call.status_ = std::move(status);
    MakeReady(call);
    Advance(action);
  }
  Perform(action);
  return true;
}

void MuxWriter::Cancel(std::uint64_t call) {
  Action action;
  {
    MutexLock lock(mutex_);
    const auto at = calls_.find(call);
    if (at == calls_.end()) return;
    const CallPtr cancelled = std::move(at->second);
    calls_.erase(at);
    Remove(cancelled, action);
  }
  Perform(action);
}

void MuxWriter::End(absl::Status status) {
  Action action;
  {
    MutexLock lock(mutex_);
    EndLocked(std::move(status), action);
    Advance(action);
  }
  Perform(action);
}

void MuxWriter::OnWriteDone(bool ok) {
  Action action;
  std::vector<CallPtr> ended;  // destroyed without the lock
  {
    MutexLock lock(mutex_);
    CHECK(writing_);
    writing_ = false;
    ended.swap(ending_);
    if (!ok) EndLocked(absl::CancelledError("the connection is gone"), action);
    Advance(action);
  }
  Perform(action);
}

void MuxWriter::OnDone() {
  MutexLock lock(mutex_);
  CHECK(finish_taken_ && !writing_);
}

void MuxWriter::SetWaitingBytes(CallWriter& call, std::int64_t bytes) {
  if (options_.total_buffered_bytes != nullptr && bytes != call.waiting_bytes_) {
    options_.total_buffered_bytes->fetch_add(bytes - call.waiting_bytes_,
                                             std::memory_order_relaxed);
  }
  call.waiting_bytes_ = bytes;
}

void MuxWriter::DropWaiting(CallWriter& call) {
  call.waiting_.clear();
  SetWaitingBytes(call, 0);
}

void MuxWriter::Buffer(CallWriter& call, v1::WorkerGenerateResponse response) {
  if (options_.merge != nullptr && !call.waiting_.empty()) {
    v1::WorkerGenerateResponse& into = call.waiting_.back();
    const std::int64_t before = options_.size_bytes(into);
    if (options_.merge(into, response)) {
      SetWaitingBytes(call, call.waiting_bytes_ + options_.size_bytes(into) - before);
      return;
    }
  }
  SetWaitingBytes(call, call.waiting_bytes_ + options_.size_bytes(response));
  call.waiting_.push_back(std::move(response));
  MakeReady(call);
}

void MuxWriter::MakeReady(CallWriter& call) {
  if (call.ready_) return;
  call.ready_ = true;
  ready_.push_back(calls_.at(call.call_));
}

void MuxWriter::Remove(CallPtr call, Action& action) {
  DropWaiting(*call);
  if (call->state_ == CallWriter::State::kOpen && call->on_cancel_ != nullptr) {
    action.cancelled.push_back(call);
  }
  call->state_ = CallWriter::State::kEnded;
}

void MuxWriter::EndLocked(absl::Status status, Action& action) {
  if (end_.has_value()) return;
  end_ = std::move(status);
  for (auto& [number, call] : calls_) Remove(call, action);
  calls_.clear();
  ready_.clear();
}

void MuxWriter::FillEvent(const CallPtr& call, v1::GenerateEvent& event) {
  event.set_call(call->call_);
  if (!call->waiting_.empty()) {
    v1::WorkerGenerateResponse& next = call->waiting_.front();
    SetWaitingBytes(*call, call->waiting_bytes_ - options_.size_bytes(next));
    event.mutable_response()->Swap(&next);
    call->waiting_.pop_front();
  }
  if (!call->waiting_.empty()) {
    MakeReady(*call);
  } else if (call->state_ == CallWriter::State::kFlushing) {
    FillEnd(call->status_, *event.mutable_end());
    call->state_ = CallWriter::State::kEnded;
    ending_.push_back(call);
    calls_.erase(call->call_);
  }
}

void MuxWriter::FillMessage() {
  in_flight_.Clear();
  for (std::size_t bytes = 0; !ready_.empty() && bytes < kFullMessageBytes;) {
    const CallPtr call = std::move(ready_.front());
    ready_.pop_front();
    call->ready_ = false;
    if (call->state_ == CallWriter::State::kEnded) continue;  // cancelled
    v1::GenerateEvent& event = *in_flight_.add_events();
    FillEvent(call, event);
    bytes += event.ByteSizeLong();
  }
}

void MuxWriter::Advance(Action& action) {
  if (writing_ || finish_taken_) return;
  if (end_.has_value()) {
    finish_taken_ = true;
    action.finish = *end_;
    return;
  }
  FillMessage();
  if (in_flight_.events().empty()) return;
  writing_ = true;
  action.write = &in_flight_;
}

void MuxWriter::Perform(const Action& action) {
  // The producers first: after sink_.Finish() the sink's owner may drop its reference to us.
  for (const CallPtr& call : action.cancelled) call->on_cancel_();
  if (action.write != nullptr) sink_.StartWrite(*action.write);
  if (action.finish.has_value()) sink_.Finish(*action.finish);
}

}  // namespace weft
