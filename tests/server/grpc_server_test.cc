#include "server/grpc_server.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/grpc_status.h"
#include "weft/v1/inference.grpc.pb.h"

// For LeakSanitizer: c-ares keeps the name it last looked up.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares"; }

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Answers with the sizes it saw.
class Service : public v1::Inference::CallbackService {
 public:
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse* response) override {
    ++calls;
    peer = context->peer();
    response->set_version(std::string(answer_bytes, 'x'));
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    grpc::ServerUnaryReactor* none = nullptr;
    if (hold && held.compare_exchange_strong(none, reactor)) return reactor;
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  // As often as one likes at once.
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest*,
                                         v1::GetModelInfoResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  std::size_t answer_bytes = 1;
  bool hold = false;  // the first call is not answered
  std::atomic<int> calls = 0;
  std::string peer;  // of the last call
  std::atomic<grpc::ServerUnaryReactor*> held = nullptr;
};

std::string Bytes(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  buffer.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return bytes;
}

class GrpcServerTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<GrpcServer>> Start(std::vector<std::string> addresses,
                                                    GrpcServerOptions options = {}) {
    grpc::Service* services[] = {&service_};
    options.listen_addresses = std::move(addresses);
    return GrpcServer::Start(options, services);
  }
  static absl::Status Call(const std::string& address, GrpcTransportOptions transport = {}) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse response;
    return FromGrpcStatus(v1::Inference::NewStub(NewGrpcChannel(address, {.transport = transport}))
                              ->GetServerInfo(&context, {}, &response));
  }

  Service service_;
};

TEST_F(GrpcServerTest, ListensOnEveryAddressAndTellsThePickedPort) {
  const std::string name = "unix-abstract:weft-test-" + std::to_string(getpid());
  auto server = Start({"127.0.0.1:0", name, "localhost:0"});
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_EQ((*server)->addresses().size(), 3);
  EXPECT_THAT((*server)->addresses()[0], StartsWith("127.0.0.1:"));
  EXPECT_NE((*server)->addresses()[0], "127.0.0.1:0");
  EXPECT_EQ((*server)->addresses()[1], name);
  for (const std::string& address : (*server)->addresses()) {
    EXPECT_TRUE(Call(address).ok()) << address << Call(address);
  }
}

TEST_F(GrpcServerTest, AnAddressInUseIsRefusedByName) {
  const std::string name = "unix-abstract:weft-test-" + std::to_string(getpid());
  auto first = Start({"127.0.0.1:0", name});
  ASSERT_TRUE(first.ok()) << first.status();
  for (const std::string& taken : (*first)->addresses()) {
    auto second = Start({"127.0.0.1:0", taken});
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << taken;
    EXPECT_THAT(std::string(second.status().message()), HasSubstr("cannot listen on " + taken));
    EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
  }
  EXPECT_TRUE(Call((*first)->addresses()[0]).ok());
}

TEST_F(GrpcServerTest, AnAddressThatIsNotOursOrDoesNotParseIsRefusedByName) {
  auto foreign = Start({"192.0.2.1:0"});  // TEST-NET-1
  EXPECT_EQ(foreign.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(foreign.status().message()), HasSubstr("192.0.2.1:0: Cannot assign"));
  for (const char* bad : {"", "localhost", ":1", "localhost:", "localhost:x", "localhost:65536",
                          "localhost:-1", "unix-abstract:"}) {
    EXPECT_EQ(Start({bad}).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(Start({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(GrpcServerTest, MessagesAreAsLargeAsTheOptionsSay) {
  auto server = Start({"127.0.0.1:0"});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string& address = (*server)->addresses()[0];
  service_.answer_bytes = 10 << 20;  // gRPC's own limit is 4 MiB
  EXPECT_TRUE(Call(address).ok());
  const v1::GetServerInfoResponse sized = [&] {
    v1::GetServerInfoResponse r;
    r.set_version(std::string(service_.answer_bytes, 'x'));
    return r;
  }();
  const auto bytes = static_cast<std::int64_t>(sized.ByteSizeLong());
  EXPECT_TRUE(Call(address, {.max_message_bytes = bytes}).ok());
  EXPECT_EQ(Call(address, {.max_message_bytes = bytes - 1}).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(GrpcServerTest, CallsBeyondTheConcurrentStreamsOfAConnectionWaitInTheClient) {
  for (const std::int32_t streams : {1, 2}) {
    service_.hold = true;
    service_.held = nullptr;
    service_.calls = 0;
    auto server = Start({"127.0.0.1:0"}, {.max_concurrent_streams = streams});
    ASSERT_TRUE(server.ok()) << server.status();
    const auto stub = v1::Inference::NewStub(NewGrpcChannel((*server)->addresses()[0]));
    std::thread first([&stub] {
      grpc::ClientContext context;
      v1::GetServerInfoResponse response;
      EXPECT_TRUE(stub->GetServerInfo(&context, {}, &response).ok());
    });
    while (service_.held == nullptr) std::this_thread::yield();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(streams == 1 ? 300 : 60000));
    v1::GetServerInfoResponse response;
    const grpc::Status second = stub->GetServerInfo(&context, {}, &response);
    EXPECT_EQ(second.ok(), streams == 2);
    EXPECT_EQ(service_.calls, streams);
    service_.held.load()->Finish(grpc::Status::OK);
    first.join();
  }
}

TEST_F(GrpcServerTest, AnOldConnectionIsReplacedWithoutAFailedCall) {
  auto server = Start({"127.0.0.1:0"}, {.max_connection_age = absl::Milliseconds(50),
                                        .max_connection_age_grace = absl::Seconds(30)});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto stub = v1::Inference::NewStub(NewGrpcChannel((*server)->addresses()[0]));
  std::set<std::string> connections;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (connections.size() < 3 && std::chrono::steady_clock::now() < end) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse response;
    const grpc::Status status = stub->GetServerInfo(&context, {}, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    connections.insert(service_.peer);
  }
  EXPECT_EQ(connections.size(), 3);
}

TEST_F(GrpcServerTest, HealthFollowsSetServing) {
  auto server = Start({"127.0.0.1:0"});
  ASSERT_TRUE(server.ok()) << server.status();
  auto channel = NewGrpcChannel((*server)->addresses()[0]);
  // grpc.health.v1 by hand: no generated code for it is installed. {1: service} -> {1: status}.
  const auto check = [&](const std::string& service) -> std::string {
    std::string request;
    if (!service.empty())
      request = std::string("\x0a") + static_cast<char>(service.size()) + service;
    grpc::Slice slice(request);
    grpc::ByteBuffer in(&slice, 1);
    grpc::ByteBuffer out;
    grpc::ClientContext context;
    grpc::GenericStub stub(channel);
    grpc::CompletionQueue queue;
    auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", in, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&out, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    if (!status.ok()) return status.error_code() == grpc::NOT_FOUND ? "unknown" : "error";
    std::vector<grpc::Slice> slices;
    out.Dump(&slices);
    std::string bytes;
    for (const grpc::Slice& s : slices) bytes.append(s.begin(), s.end());
    return bytes == "\x08\x01" ? "serving" : bytes == "\x08\x02" ? "not serving" : "?";
  };
  EXPECT_EQ(check(""), "serving");
  EXPECT_EQ(check("weft.v1.Inference"), "unknown");
  (*server)->SetServing("weft.v1.Inference", false);
  EXPECT_EQ(check("weft.v1.Inference"), "not serving");
  (*server)->SetServing("weft.v1.Inference", true);
  EXPECT_EQ(check("weft.v1.Inference"), "serving");
}

TEST_F(GrpcServerTest, ReflectionListsTheServices) {
  auto server = Start({"127.0.0.1:0"});
  ASSERT_TRUE(server.ok()) << server.status();
  grpc::GenericStub stub(NewGrpcChannel((*server)->addresses()[0]));
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const std::string list_services("\x3a\x00", 2);  // {7: ""}
  grpc::Slice slice(list_services);
  grpc::ByteBuffer in(&slice, 1);
  grpc::ByteBuffer out;
  auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(wait());
  call->WriteLast(in, {}, nullptr);
  ASSERT_TRUE(wait());
  call->Read(&out, nullptr);
  ASSERT_TRUE(wait());
  EXPECT_THAT(Bytes(out), HasSubstr("weft.v1.Inference"));
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(wait());
  EXPECT_TRUE(status.ok());
}

TEST_F(GrpcServerTest, AChannelFindsAServerThatCameBackUnderTheSameName) {
  const std::string name = "unix-abstract:weft-test-again-" + std::to_string(getpid());
  auto stub = v1::Inference::NewStub(NewGrpcChannel(name));
  for (int round = 0; round < 3; ++round) {
    auto server = Start({name});
    ASSERT_TRUE(server.ok()) << server.status();
    const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(20);
    grpc::Status status;
    do {
      // A call may still go out on the connection that the last server is closing.
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      context.set_deadline(deadline);
      v1::GetServerInfoResponse response;
      status = stub->GetServerInfo(&context, {}, &response);
    } while (!status.ok() && std::chrono::system_clock::now() < deadline);
    EXPECT_TRUE(status.ok()) << status.error_message();
    (*server)->Shutdown(absl::ZeroDuration());
  }
}

// gRPC's Shutdown() answers a call that arrives meanwhile with CANCELLED, as if its client had.
TEST_F(GrpcServerTest, ACallThatRacesTheServersEndIsServedOrUnavailable) {
  const std::string name = "unix-abstract:weft-test-race-" + std::to_string(getpid());
  for (int round = 0; round < 20; ++round) {
    auto server = Start({"127.0.0.1:0", name});
    ASSERT_TRUE(server.ok()) << server.status();
    std::atomic<int> served = 0;
    std::vector<std::thread> clients;
    for (int i = 0; i < 8; ++i) {
      const auto channel = NewGrpcChannel((*server)->addresses()[i % 2]);
      clients.emplace_back([&served, stub = v1::Inference::NewStub(channel)] {
        grpc::Status status;
        while (status.ok()) {
          grpc::ClientContext context;
          v1::GetModelInfoResponse response;
          status = stub->GetModelInfo(&context, {}, &response);
          if (status.ok()) ++served;
        }
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE)
            << status.error_code() << ": " << status.error_message();
      });
    }
    while (served < 200) std::this_thread::yield();
    (*server)->Disconnect();
    (*server)->Shutdown(absl::ZeroDuration());
    for (std::thread& client : clients) client.join();
  }
}

}  // namespace
}  // namespace weft
