#include "tests/router/router_fixture.h"

#include <utility>

#include "absl/time/clock.h"
#include "router/grpc_leader_client.h"
#include "server/grpc_status.h"

namespace weft {

v1::GenerateRequest TextRequest(std::string_view text) {
  v1::GenerateRequest request;
  request.set_text(std::string(text));
  return request;
}

Stream::Stream(v1::Inference::Stub& stub, v1::GenerateRequest request, Deadline deadline)
    : request_(std::move(request)) {
  context_.set_deadline(deadline);
  thread_ = std::thread([this, &stub] {
    const auto reader = stub.Generate(&context_, request_);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      responses_.push_back(response);
      num_token_ids_ += response.token_ids_size();
    }
    status_ = FromGrpcStatus(reader->Finish());
    ended_ = true;
  });
}

Stream::~Stream() {
  Cancel();
  Wait();
}

const absl::Status& Stream::Wait() {
  if (thread_.joinable()) thread_.join();
  return status_;
}

std::string Stream::Text(std::int32_t index) const {
  std::string text;
  for (const auto& response : responses_) {
    if (response.index() == index) text += response.text();
  }
  return text;
}

std::vector<std::int32_t> Stream::TokenIds(std::int32_t index) const {
  std::vector<std::int32_t> ids;
  for (const auto& r : responses_) {
    if (r.index() == index) ids.insert(ids.end(), r.token_ids().begin(), r.token_ids().end());
  }
  return ids;
}

v1::GenerateResponse Stream::Last(std::int32_t index) const {
  v1::GenerateResponse last;
  for (const auto& response : responses_) {
    if (response.index() == index) last = response;
  }
  return last;
}

void RouterFixture::StartOne(ClusterOptions options) { StartSeveral(1, std::move(options)); }

void RouterFixture::StartSeveral(int num_workers, ClusterOptions options) {
  for (int i = 0; i < num_workers; ++i) {
    worker_addresses_.push_back(UniqueAddress("leader"));
    workers_.push_back(std::make_unique<FakeWorker>(worker_addresses_.back()));
  }
  StartRouter(worker_addresses_, std::move(options));
  for (int i = 0; i < num_workers; ++i) WaitUntilReady(i);
}

void RouterFixture::StartRouter(std::vector<std::string> addresses, ClusterOptions options) {
  options.addresses = std::move(addresses);
  options.link.connect = [](const std::string& address) {
    return NewGrpcLeaderClient(address, {});
  };
  cluster_ = std::make_unique<Cluster>(options);
  text_pool_ = std::make_unique<TextPool>(2, 64);
  context_.cluster = cluster_.get();
  context_.text_pool = text_pool_.get();
  service_ = std::make_unique<RouterService>(context_);
  const std::string address = UniqueAddress("router");
  auto server = GrpcServer::Start({.listen_addresses = {address}}, {service_.get()});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  channel_ = NewGrpcChannel(address);
  stub_ = v1::Inference::NewStub(channel_);
}

void RouterFixture::StopRouter() {
  server_ = nullptr;
  text_pool_ = nullptr;
  cluster_ = nullptr;
}

void RouterFixture::WaitUntilReady(std::size_t group, bool ready) {
  while (cluster_->Snapshot()->groups[group]->ready != ready) {
    absl::SleepFor(absl::Milliseconds(5));
  }
}

std::unique_ptr<Stream> RouterFixture::Send(v1::GenerateRequest request) {
  return std::make_unique<Stream>(*stub_, std::move(request));
}

void RouterFixture::Answer(std::string_view text, v1::FinishReason finish) {
  const auto call = worker().TakeCall();
  call->Send(ByteIds(text), finish);
  call->End();
}

}  // namespace weft
