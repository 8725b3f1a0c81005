#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "router/cluster.h"
#include "router/request_registry.h"
#include "router/router_service.h"
#include "router/text/chat_template.h"
#include "router/text/tokenizer.h"
#include "router/text_pool.h"
#include "server/grpc_server.h"
#include "tests/router/byte_tokenizer.h"
#include "tests/router/fake_worker.h"

namespace weft {

v1::GenerateRequest TextRequest(std::string_view text);

// A request under way in a thread of its own, and what came of it.
class Stream {
 public:
  using Deadline = std::chrono::system_clock::time_point;
  Stream(v1::Inference::Stub& stub, v1::GenerateRequest request,
         Deadline deadline = Deadline::max());
  ~Stream();

  void Cancel() { context_.TryCancel(); }
  bool ended() const { return ended_; }
  // Of all samples, as they come.
  int num_token_ids() const { return num_token_ids_; }
  const absl::Status& Wait();

  // After Wait(); of sample `index`.
  const std::vector<v1::GenerateResponse>& responses() const { return responses_; }
  std::string Text(std::int32_t index = 0) const;
  std::vector<std::int32_t> TokenIds(std::int32_t index = 0) const;
  v1::GenerateResponse Last(std::int32_t index = 0) const;

 private:
  v1::GenerateRequest request_;
  grpc::ClientContext context_;
  std::vector<v1::GenerateResponse> responses_;
  absl::Status status_;
  std::atomic<bool> ended_ = false;
  std::atomic<int> num_token_ids_ = 0;
  std::thread thread_;
};

// A router over scripted leaders, over real gRPC on abstract sockets. Nothing is started before
// the test asks for it, so that it can change `context_` first.
class RouterFixture : public ::testing::Test {
 protected:
  // One leader that is ready, and the router.
  void StartOne(ClusterOptions options = {});
  // As many leaders that are ready, and the router, which knows that they are.
  void StartSeveral(int num_workers, ClusterOptions options = {});
  void StartRouter(std::vector<std::string> addresses, ClusterOptions options = {});
  // In the order that the parts allow, as a process does; waits for every lease.
  void StopRouter();

  void WaitUntilReady(std::size_t group, bool ready = true);
  std::unique_ptr<Stream> Send(v1::GenerateRequest request);
  FakeWorker& worker(std::size_t i = 0) { return *workers_[i]; }
  // Answers the next call of a leader with `text` and an end.
  void Answer(std::string_view text, v1::FinishReason finish = v1::FINISH_REASON_LENGTH);

  std::vector<std::unique_ptr<FakeWorker>> workers_;
  std::vector<std::string> worker_addresses_;
  const std::unique_ptr<Tokenizer> tokenizer_ = ByteTokenizer();
  RequestRegistry registry_{1000};
  GenerateContext context_ = {.limits = {.served_model_name = "tiny"},
                              .tokenizer = tokenizer_.get(),
                              .registry = &registry_};
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<TextPool> text_pool_;
  std::unique_ptr<RouterService> service_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

}  // namespace weft
