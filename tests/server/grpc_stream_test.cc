#include "server/grpc_stream.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/grpc_server.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {
namespace {

using Response = v1::GenerateResponse;

// Generate echoes the prompt's ids, one message each, from a thread of its own. Then request id
// "hang" never ends by itself, "flood" writes until it is told to stop, "fail" ends with an error.
class EchoService : public v1::Inference::CallbackService {
 public:
  ~EchoService() override {
    for (std::thread& thread : threads_) thread.join();
  }

  grpc::ServerWriteReactor<Response>* Generate(grpc::CallbackServerContext*,
                                               const v1::GenerateRequest* request) override {
    auto* stream = new GrpcStream<Response>({
        .max_messages = 8,
        .max_bytes = 1 << 20,
        .size_bytes = [](const Response& r) { return static_cast<std::int64_t>(r.ByteSizeLong()); },
        .merge = nullptr,
        .on_cancel = [this] { ++cancels; },
    });
    MutexLock lock(mutex_);
    threads_.emplace_back(
        [this, writer = stream->writer(), request = *request] { Produce(*writer, request); });
    return stream;
  }

  std::atomic<int> cancels = 0;

 private:
  void Produce(StreamWriter<Response>& writer, const v1::GenerateRequest& request) {
    Response response;
    for (const std::int32_t id : request.token_ids().ids()) {
      response.clear_token_ids();
      response.add_token_ids(id);
      if (!writer.Write(response)) return;
    }
    if (request.request_id() == "hang") return;
    if (request.request_id() == "flood") {
      while (writer.Write(response)) {
      }
      ++cancels;  // learnt here, not by on_cancel
      return;
    }
    writer.Finish(
        request.request_id() == "fail"
            ? WithRetryAfter(WithReason(absl::UnavailableError("rank 1 died"), kReasonRankLost),
                             absl::Milliseconds(1500))
            : absl::OkStatus());
  }

  Mutex mutex_;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

class GrpcStreamTest : public ::testing::Test {
 protected:
  GrpcStreamTest() {
    grpc::Service* services[] = {&service_};
    auto server = GrpcServer::Start({.listen_addresses = {"127.0.0.1:0"}}, services);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Inference::NewStub(NewGrpcChannel(server_->addresses()[0]));
  }
  ~GrpcStreamTest() override { server_.reset(); }  // before the service

  static v1::GenerateRequest Request(const std::string& id, int ids) {
    v1::GenerateRequest request;
    request.set_request_id(id);
    for (int i = 0; i < ids; ++i) request.mutable_token_ids()->add_ids(i);
    return request;
  }
  void AwaitCancels(int count) {
    while (service_.cancels < count) std::this_thread::yield();  // else the test times out
  }

  EchoService service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(GrpcStreamTest, DeliversEveryMessageInOrderThenTheStatusWithItsDetails) {
  for (const char* id : {"echo", "fail"}) {
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, Request(id, 8));
    Response response;
    std::vector<int> seen;
    while (reader->Read(&response)) seen.push_back(response.token_ids(0));
    EXPECT_THAT(seen, ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    const absl::Status status = FromGrpcStatus(reader->Finish());
    if (std::string(id) == "echo") {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(status.message(), "rank 1 died");
      EXPECT_EQ(ReasonOf(status), "RANK_LOST");
      EXPECT_EQ(RetryAfterOf(status), absl::Milliseconds(1500));
    }
  }
  EXPECT_EQ(service_.cancels, 0);
}

TEST_F(GrpcStreamTest, ACancelADeadlineAndAVanishedClientReachTheProducer) {
  {
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, Request("hang", 1));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    // It may be cancelled before the server has seen it: then there is nobody to tell.
  }
  const int before = service_.cancels;
  {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
    auto reader = stub_->Generate(&context, Request("hang", 1));
    Response response;
    ASSERT_TRUE(reader->Read(&response));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  AwaitCancels(before + 1);
  {
    auto stub = v1::Inference::NewStub(NewGrpcChannel(server_->addresses()[0]));
    grpc::ClientContext context;
    auto reader = stub->Generate(&context, Request("hang", 1));
    Response response;
    ASSERT_TRUE(reader->Read(&response));
    context.TryCancel();
    while (reader->Read(&response)) {
    }
    reader->Finish();
  }
  AwaitCancels(before + 2);
}

TEST_F(GrpcStreamTest, AReaderThatDoesNotReadLosesItsStreamAndNoOther) {
  grpc::ClientContext context;
  auto slow = stub_->Generate(&context, Request("flood", 1));
  AwaitCancels(1);
  grpc::ClientContext other_context;
  auto other = stub_->Generate(&other_context, Request("echo", 5));
  Response response;
  int seen = 0;
  while (other->Read(&response)) ++seen;
  EXPECT_EQ(seen, 5);
  EXPECT_TRUE(other->Finish().ok());
  while (slow->Read(&response)) {
  }
  const absl::Status status = FromGrpcStatus(slow->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), kReasonSlowReader);
}

TEST_F(GrpcStreamTest, ACancelStormLeavesTheServerWhole) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 150;
  std::vector<std::thread> clients;
  std::atomic<int> ended = 0;
  for (int t = 0; t < kThreads; ++t) {
    clients.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        grpc::ClientContext context;
        auto reader = stub_->Generate(&context, Request(i % 3 == 0 ? "hang" : "echo", i % 8));
        if (i % 3 == 0 || (i + t) % 2 == 0) context.TryCancel();
        Response response;
        while (reader->Read(&response)) {
        }
        reader->Finish();
        ++ended;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(ended, kThreads * kCalls);
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request("echo", 3));
  Response response;
  int seen = 0;
  while (reader->Read(&response)) ++seen;
  EXPECT_EQ(seen, 3);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(GrpcStreamTest, ShutdownEndsStreamsThatDoNotEnd) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request("hang", 1));
  Response response;
  ASSERT_TRUE(reader->Read(&response));
  server_->Shutdown(absl::Milliseconds(50));
  EXPECT_EQ(service_.cancels, 1);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_FALSE(reader->Finish().ok());
}

}  // namespace
}  // namespace weft
