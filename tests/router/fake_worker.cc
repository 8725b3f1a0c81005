#include "tests/router/fake_worker.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/grpc_mux_stream.h"
#include "server/grpc_stream.h"

namespace weft {

class FakeWorker::Service final : public v1::Worker::CallbackService {
 public:
  explicit Service(FakeWorker& worker) : worker_(worker) {}

  grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>* Generate(
      grpc::CallbackServerContext*) override {
    return new GrpcMuxStream(
        {.size_bytes = [](const v1::WorkerGenerateResponse&) { return std::int64_t{1}; }},
        [this](v1::WorkerGenerateRequest& request, absl::Time deadline, MuxWriter& mux,
               std::uint64_t number) { StartCall(request, deadline, mux, number); });
  }

  grpc::ServerWriteReactor<v1::GroupState>* WatchState(grpc::CallbackServerContext*,
                                                       const v1::WatchStateRequest*) override {
    StreamWriterOptions<v1::GroupState> options;
    options.size_bytes = [](const v1::GroupState&) { return std::int64_t{1}; };
    auto* stream = new GrpcStream<v1::GroupState>(std::move(options));
    MutexLock lock(worker_.mutex_);
    if (!worker_.silent_) stream->writer()->Write(worker_.state_);
    worker_.watchers_.push_back(stream->writer());
    return stream;
  }

 private:
  void StartCall(v1::WorkerGenerateRequest& request, absl::Time deadline, MuxWriter& mux,
                 std::uint64_t number) {
    auto call = std::make_shared<Call>();
    call->request_ = std::move(request);
    call->deadline_ = deadline;
    call->writer_ = mux.Open(number, [weak = std::weak_ptr<Call>(call)] {
      if (const auto alive = weak.lock()) {
        MutexLock lock(alive->mutex_);
        alive->cancelled_ = true;
        alive->changed_.NotifyAll();
      }
    });
    if (call->writer_ == nullptr) return;
    MutexLock lock(worker_.mutex_);
    if (!worker_.refusal_.ok()) {
      ++worker_.num_refused_;
      call->writer_->Finish(worker_.refusal_);
      return;
    }
    worker_.calls_.push_back(std::move(call));
    worker_.changed_.NotifyAll();
  }

  FakeWorker& worker_;
};

bool FakeWorker::Call::Send(absl::Span<const std::int32_t> ids, v1::FinishReason finish) {
  v1::WorkerGenerateResponse response;
  response.mutable_token_ids()->Add(ids.begin(), ids.end());
  response.set_finish_reason(finish);
  return writer_->Write(std::move(response));
}

void FakeWorker::Call::WaitUntilCancelled() {
  MutexLock lock(mutex_);
  while (!cancelled_) changed_.Wait(mutex_);
}

v1::GroupState FakeWorker::ReadyState() {
  v1::GroupState state;
  state.set_vocab_size(300);
  state.add_eos_token_ids(0);
  v1::GroupInfo& group = *state.mutable_group();
  group.set_ready(true);
  group.set_state("ready");
  group.set_max_model_len(64);
  group.set_tensor_parallel_size(2);
  return state;
}

FakeWorker::FakeWorker(std::string address, v1::GroupState state)
    : address_(std::move(address)), state_(std::move(state)) {
  Start();
  beat_ = std::thread([this] { Beat(); });
}

FakeWorker::~FakeWorker() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  beat_.join();
  Kill();
}

void FakeWorker::Beat() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
    for (std::size_t i = 0; !silent_ && i < watchers_.size(); ++i) watchers_[i]->Write(state_);
  }
}

std::shared_ptr<FakeWorker::Call> FakeWorker::TakeCall() {
  MutexLock lock(mutex_);
  while (calls_.empty()) changed_.Wait(mutex_);
  auto call = std::move(calls_.front());
  calls_.pop_front();
  return call;
}

int FakeWorker::num_calls_waiting() {
  MutexLock lock(mutex_);
  return static_cast<int>(calls_.size());
}

void FakeWorker::SetState(v1::GroupState state) {
  MutexLock lock(mutex_);
  state_ = std::move(state);
}

void FakeWorker::FallSilent() {
  MutexLock lock(mutex_);
  silent_ = true;
}

void FakeWorker::RefuseCalls(absl::Status status) {
  MutexLock lock(mutex_);
  refusal_ = std::move(status);
}

int FakeWorker::num_refused() {
  MutexLock lock(mutex_);
  return num_refused_;
}

void FakeWorker::Kill() {
  {
    MutexLock lock(mutex_);
    watchers_.clear();
  }
  server_ = nullptr;
  service_ = nullptr;
}

void FakeWorker::Start() {
  service_ = std::make_unique<Service>(*this);
  auto server = GrpcServer::Start({.listen_addresses = {address_}}, {service_.get()});
  CHECK_MSG(server.ok(), std::string(server.status().message()));
  server_ = *std::move(server);
  MutexLock lock(mutex_);
  silent_ = false;
}

std::string UniqueAddress(std::string_view role) {
  static std::atomic<int> next = 0;
  return fmt::format("unix-abstract:weft-test-{}-{}-{}", getpid(), next++, role);
}

}  // namespace weft
