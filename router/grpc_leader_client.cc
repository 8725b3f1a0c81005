#include "router/grpc_leader_client.h"

#include <utility>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "server/grpc_status.h"
#include "weft/v1/worker.grpc.pb.h"

namespace weft {
namespace {

// One that takes longer is lost, as its stream will be.
constexpr std::chrono::seconds kContinueTimeout{10};

// Both streams: what is read goes to OnMessage(), and the reactor holds itself until gRPC is done
// with it.
template <typename Response>
class GrpcStream : public LeaderClient::Stream,
                   private grpc::ClientReadReactor<Response>,
                   public std::enable_shared_from_this<GrpcStream<Response>> {
 public:
  void Start() override {
    self_ = this->shared_from_this();
    Open(context_, *this);
    this->StartRead(&response_);
    this->StartCall();
  }
  void Cancel() override { context_.TryCancel(); }

 protected:
  using Reactor = grpc::ClientReadReactor<Response>;

  virtual void Open(grpc::ClientContext& context, Reactor& reactor) = 0;
  virtual void OnMessage(Response& response) = 0;
  virtual void OnEnd(const absl::Status& status) = 0;

  grpc::ClientContext context_;

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    OnMessage(response_);
    response_.Clear();
    this->StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<GrpcStream> self = std::move(self_);
    OnEnd(FromGrpcStatus(status));
  }

  Response response_;
  std::shared_ptr<GrpcStream> self_;
};

class WatchStream final : public GrpcStream<v1::GroupState> {
 public:
  WatchStream(v1::Worker::Stub& stub, LeaderClient::WatchHandler& handler, bool block_changes)
      : stub_(stub), handler_(handler) {
    request_.set_block_changes(block_changes);
  }

 private:
  void Open(grpc::ClientContext& context, Reactor& reactor) override {
    stub_.async()->WatchState(&context, &request_, &reactor);
  }
  void OnMessage(v1::GroupState& state) override { handler_.OnState(std::move(state)); }
  void OnEnd(const absl::Status& status) override { handler_.OnWatchEnd(status); }

  v1::Worker::Stub& stub_;
  LeaderClient::WatchHandler& handler_;
  v1::WatchStateRequest request_;
};

class GenerateStream final : public GrpcStream<v1::WorkerGenerateResponse> {
 public:
  GenerateStream(v1::Worker::Stub& stub, const v1::WorkerGenerateRequest& request,
                 std::chrono::system_clock::time_point deadline,
                 LeaderClient::GenerateHandler& handler)
      : stub_(stub), request_(request), handler_(handler) {
    context_.set_deadline(deadline);
  }

 private:
  void Open(grpc::ClientContext& context, Reactor& reactor) override {
    stub_.async()->Generate(&context, &request_, &reactor);
  }
  void OnMessage(v1::WorkerGenerateResponse& response) override { handler_.OnResponse(response); }
  void OnEnd(const absl::Status& status) override { handler_.OnGenerateEnd(status); }

  v1::Worker::Stub& stub_;
  const v1::WorkerGenerateRequest& request_;
  LeaderClient::GenerateHandler& handler_;
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
      : stub_(v1::Worker::NewStub(NewGrpcChannel(address, options))) {}

  std::shared_ptr<Stream> WatchState(WatchHandler& handler, bool block_changes) override {
    return std::make_shared<WatchStream>(*stub_, handler, block_changes);
  }
  std::shared_ptr<Stream> Generate(const v1::WorkerGenerateRequest& request,
                                   std::chrono::system_clock::time_point deadline,
                                   GenerateHandler& handler) override {
    return std::make_shared<GenerateStream>(*stub_, request, deadline, handler);
  }
  void ContinueKv(v1::ContinueKvRequest request) override {
    const auto call = std::make_shared<ContinueCall>();
    call->request = std::move(request);
    call->context.set_deadline(std::chrono::system_clock::now() + kContinueTimeout);
    stub_->async()->ContinueKv(&call->context, &call->request, &call->response,
                               [call](const grpc::Status&) {});
  }

 private:
  const std::unique_ptr<v1::Worker::Stub> stub_;
};

}  // namespace

std::unique_ptr<LeaderClient> NewGrpcLeaderClient(const std::string& address,
                                                  const GrpcChannelOptions& options) {
  GrpcChannelOptions own = options;
  own.retries = false;  // the router replays
  return std::make_unique<GrpcLeaderClient>(address, own);
}

}  // namespace weft
