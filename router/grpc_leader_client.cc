#include "router/grpc_leader_client.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "grpcpp/alarm.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "router/generate_mux.h"
#include "server/base/mutex.h"
#include "server/grpc_status.h"
#include "weft/v1/worker.grpc.pb.h"

namespace weft {
namespace {

// One that takes longer is lost, as its stream will be.
constexpr std::chrono::seconds kContinueTimeout{10};
// Of a request on the shared stream.
constexpr std::size_t kMaxSharedBytes = std::size_t{256} << 10;

// Holds itself until gRPC is done with it.
class WatchStream final : public LeaderClient::Stream,
                          private grpc::ClientReadReactor<v1::GroupState>,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  WatchStream(v1::Worker::Stub& stub, LeaderClient::WatchHandler& handler, bool block_changes)
      : stub_(stub), handler_(handler) {
    request_.set_block_changes(block_changes);
  }

  void Start() override {
    self_ = shared_from_this();
    stub_.async()->WatchState(&context_, &request_, this);
    StartRead(&state_);
    StartCall();
  }
  void Cancel() override { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    handler_.OnState(std::move(state_));
    state_.Clear();
    StartRead(&state_);
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<WatchStream> self = std::move(self_);
    handler_.OnWatchEnd(FromGrpcStatus(status));
  }

  v1::Worker::Stub& stub_;
  LeaderClient::WatchHandler& handler_;
  v1::WatchStateRequest request_;
  grpc::ClientContext context_;
  v1::GroupState state_;
  std::shared_ptr<WatchStream> self_;
};

// The stream of a GenerateMux. Deletes itself when gRPC is done with it.
class GenerateStream final
    : private grpc::ClientBidiReactor<v1::GenerateCommand, v1::GenerateEvents>,
      private StreamSink<v1::GenerateCommand> {
 public:
  static std::shared_ptr<GenerateMux> Open(v1::Worker::Stub& stub, bool alone) {
    auto* stream = new GenerateStream(alone);
    std::shared_ptr<GenerateMux> mux = stream->mux_;
    stub.async()->Generate(&stream->context_, stream);
    stream->AddHold();  // until Finish(): writes come from any thread
    stream->StartRead(&stream->events_);
    stream->StartCall();
    return mux;
  }

 private:
  using Reactor = grpc::ClientBidiReactor<v1::GenerateCommand, v1::GenerateEvents>;

  explicit GenerateStream(bool alone)
      : mux_(std::make_shared<GenerateMux>(static_cast<StreamSink<v1::GenerateCommand>&>(*this),
                                           alone)) {}

  void StartWrite(const v1::GenerateCommand& command) override { Reactor::StartWrite(&command); }
  // OnDone() may come before this returns.
  void Finish(const absl::Status&) override {
    context_.TryCancel();
    RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      mux()->Close();
      return;
    }
    mux()->OnEvents(events_);
    events_.Clear();
    StartRead(&events_);
  }
  void OnWriteDone(bool ok) override { mux()->OnWriteDone(ok); }
  void OnDone(const grpc::Status& status) override {
    mux()->OnEnd(FromGrpcStatus(status));
    delete this;
  }

  // A copy: what is done with it may lead to OnDone() on another thread.
  std::shared_ptr<GenerateMux> mux() const { return mux_; }

  const std::shared_ptr<GenerateMux> mux_;
  grpc::ClientContext context_;
  v1::GenerateEvents events_;
};

// Requests share one stream; a large one has its own.
class GrpcOpener final : public MuxCall::Opener {
 public:
  explicit GrpcOpener(std::shared_ptr<v1::Worker::Stub> stub) : stub_(std::move(stub)) {}
  ~GrpcOpener() override {
    if (shared_ != nullptr) shared_->Close();
  }

  void Place(const std::shared_ptr<MuxCall>& call) override {
    if (call->request().ByteSizeLong() > kMaxSharedBytes) {
      while (!GenerateStream::Open(*stub_, /*alone=*/true)->Start(call)) {
      }
    } else {
      while (!Shared()->Start(call)) {
      }
    }
  }
  void RunSoon(std::function<void()> task) override {
    auto* alarm = new grpc::Alarm;
    alarm->Set(std::chrono::system_clock::now(), [alarm, task = std::move(task)](bool) {
      task();
      delete alarm;
    });
  }

 private:
  std::shared_ptr<GenerateMux> Shared() {
    MutexLock lock(mutex_);
    if (shared_ == nullptr || shared_->closed()) {
      shared_ = GenerateStream::Open(*stub_, /*alone=*/false);
    }
    return shared_;
  }

  const std::shared_ptr<v1::Worker::Stub> stub_;
  Mutex mutex_;
  std::shared_ptr<GenerateMux> shared_ ABSL_GUARDED_BY(mutex_);
};

// A call that lives until its end.
struct ContinueCall {
  grpc::ClientContext context;
  v1::ContinueKvRequest request;
  v1::ContinueKvResponse response;
};

class GrpcLeaderClient final : public LeaderClient {
 public:
  GrpcLeaderClient(const std::string& address, const GrpcChannelOptions& options)
      : stub_(v1::Worker::NewStub(NewGrpcChannel(address, options))),
        opener_(std::make_shared<GrpcOpener>(stub_)) {}

  std::shared_ptr<Stream> WatchState(WatchHandler& handler, bool block_changes) override {
    return std::make_shared<WatchStream>(*stub_, handler, block_changes);
  }
  std::shared_ptr<Stream> Generate(const v1::WorkerGenerateRequest& request,
                                   std::chrono::system_clock::time_point deadline,
                                   GenerateHandler& handler) override {
    return std::make_shared<MuxCall>(opener_, request, deadline, handler);
  }
  void ContinueKv(v1::ContinueKvRequest request) override {
    const auto call = std::make_shared<ContinueCall>();
    call->request = std::move(request);
    call->context.set_deadline(std::chrono::system_clock::now() + kContinueTimeout);
    stub_->async()->ContinueKv(&call->context, &call->request, &call->response,
                               [call](const grpc::Status&) {});
  }

 private:
  const std::shared_ptr<v1::Worker::Stub> stub_;
  const std::shared_ptr<GrpcOpener> opener_;
};

}  // namespace

std::unique_ptr<LeaderClient> NewGrpcLeaderClient(const std::string& address,
                                                  const GrpcChannelOptions& options) {
  GrpcChannelOptions own = options;
  own.retries = false;  // the router replays
  // What one response may have must not depend on what clients may send.
  own.transport.max_message_bytes =
      std::max(own.transport.max_message_bytes, GrpcTransportOptions().max_message_bytes);
  return std::make_unique<GrpcLeaderClient>(address, own);
}

}  // namespace weft
