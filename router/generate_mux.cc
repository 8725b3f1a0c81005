#include "router/generate_mux.h"

#include <string>
#include <utility>

#include "fmt/format.h"
#include "server/grpc_status.h"

namespace weft {
namespace {

// What may wait for a leader that reads no commands; the group is lost long before.
constexpr std::size_t kMaxCommands = 1 << 20;
constexpr std::int64_t kMaxCommandBytes = std::int64_t{1} << 30;

std::int64_t CommandBytes(const v1::GenerateCommand& command) {
  return static_cast<std::int64_t>(command.ByteSizeLong());
}

// What the end of the stream is to a call that shared it: not its own doing, whatever it was.
absl::Status AsLoss(const absl::Status& status) {
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) return status;
  return absl::UnavailableError(
      fmt::format("the stream to the leader has ended: {}", status.ToString()));
}

}  // namespace

void MuxCall::Start() {
  bool cancelled = false;
  {
    MutexLock lock(mutex_);
    cancelled = cancelled_;
  }
  if (cancelled) {
    EndSoon();
  } else {
    opener_->Place(shared_from_this());
  }
}

void MuxCall::Cancel() {
  std::shared_ptr<GenerateMux> mux;
  std::uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    if (std::exchange(cancelled_, true)) return;
    mux = mux_;
    number = number_;
  }
  // Without a stream, whoever gives it one sees that it is cancelled.
  if (mux != nullptr && mux->Cancel(number)) EndSoon();
}

v1::GenerateCommand MuxCall::StartCommand(std::uint64_t number) const {
  v1::GenerateCommand command;
  command.set_call(number);
  *command.mutable_start() = request_;
  if (deadline_ != std::chrono::system_clock::time_point::max()) {
    command.set_timeout_us(std::chrono::duration_cast<std::chrono::microseconds>(
                               deadline_ - std::chrono::system_clock::now())
                               .count());
  }
  return command;
}

bool MuxCall::Attach(std::shared_ptr<GenerateMux> mux, std::uint64_t number) {
  MutexLock lock(mutex_);
  mux_ = std::move(mux);
  number_ = number;
  return !cancelled_;
}

void MuxCall::Deliver(v1::WorkerGenerateResponse& response) {
  MutexLock lock(delivery_mutex_);
  if (!ended_) handler_.OnResponse(response);
}

void MuxCall::End(const absl::Status& status) {
  {
    MutexLock lock(delivery_mutex_);
    if (std::exchange(ended_, true)) return;
  }
  handler_.OnGenerateEnd(status);
}

void MuxCall::EndSoon() {
  opener_->RunSoon([self = shared_from_this()] { self->End(absl::CancelledError("cancelled")); });
}

GenerateMux::GenerateMux(StreamSink<v1::GenerateCommand>& sink, bool alone)
    : alone_(alone),
      commands_(sink, {.max_messages = kMaxCommands,
                       .max_bytes = kMaxCommandBytes,
                       .size_bytes = CommandBytes}) {}

bool GenerateMux::Start(const std::shared_ptr<MuxCall>& call) {
  const std::uint64_t number = next_number_.fetch_add(1);
  v1::GenerateCommand command = call->StartCommand(number);  // its request is there until its end
  {
    MutexLock lock(mutex_);
    if (closed_) return false;
    calls_.emplace(number, call);
  }
  // That the stream has ended meanwhile, the call learns by OnEnd().
  commands_.Write(std::move(command));
  // Behind it: a cancel must not overtake the start.
  if (!call->Attach(shared_from_this(), number) && Cancel(number)) call->EndSoon();
  return true;
}

bool GenerateMux::Cancel(std::uint64_t number) {
  {
    MutexLock lock(mutex_);
    if (calls_.erase(number) == 0) return false;
  }
  if (alone_) {
    Close();
    return true;
  }
  v1::GenerateCommand command;
  command.set_call(number);
  command.set_cancel(true);
  commands_.Write(std::move(command));
  return true;
}

void GenerateMux::Close() {
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  commands_.OnCancel();
}

bool GenerateMux::closed() const {
  MutexLock lock(mutex_);
  return closed_;
}

void GenerateMux::OnEvents(v1::GenerateEvents& events) {
  {
    MutexLock lock(mutex_);
    for (const v1::GenerateEvent& event : events.events()) {
      const auto at = calls_.find(event.call());
      addressees_.push_back(at == calls_.end() ? nullptr : at->second);
      if (at != calls_.end() && event.has_end()) calls_.erase(at);
    }
  }
  for (int i = 0; i < events.events_size(); ++i) {
    const std::shared_ptr<MuxCall> call = std::move(addressees_[static_cast<std::size_t>(i)]);
    if (call == nullptr) continue;  // cancelled
    v1::GenerateEvent& event = *events.mutable_events(i);
    if (event.has_response()) call->Deliver(*event.mutable_response());
    if (!event.has_end()) continue;
    const v1::GenerateEnd& end = event.end();
    call->End(
        FromGrpcStatus({static_cast<grpc::StatusCode>(end.code()), end.message(), end.details()}));
    if (alone_) Close();
  }
  addressees_.clear();
}

void GenerateMux::OnEnd(const absl::Status& status) {
  absl::flat_hash_map<std::uint64_t, std::shared_ptr<MuxCall>> calls;
  {
    MutexLock lock(mutex_);
    closed_ = true;
    calls.swap(calls_);
  }
  commands_.OnDone();
  if (calls.empty()) return;
  const absl::Status end = alone_ && !status.ok() ? status : AsLoss(status);
  for (const auto& [number, call] : calls) call->End(end);
}

}  // namespace weft
