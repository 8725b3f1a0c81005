#include "router/router_metrics.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "router/grpc_leader_client.h"
#include "router/router_service.h"
#include "server/grpc_status.h"
#include "tests/router/fake_worker.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(RouterMetricsTest, CountsRequestsByOutcomeAndReason) {
  MetricRegistry registry("m");
  RouterMetrics metrics(registry);
  const auto end = [&metrics](const absl::Status& status, v1::FinishReason finish, bool sent) {
    metrics.OnRequest();
    metrics.OnEnd(status, finish, sent);
  };
  const auto lost = WithReason(absl::UnavailableError(""), kReasonRankLost);
  end(absl::OkStatus(), v1::FINISH_REASON_STOP, true);
  end(absl::OkStatus(), v1::FINISH_REASON_LENGTH, true);
  end(absl::OkStatus(), v1::FINISH_REASON_ABORTED, true);
  end(lost, v1::FINISH_REASON_UNSPECIFIED, true);
  end(absl::CancelledError(""), v1::FINISH_REASON_UNSPECIFIED, false);
  EXPECT_THAT(registry.Scrape(), Not(HasSubstr("weft_router_rejects_total")));
  end(lost, v1::FINISH_REASON_UNSPECIFIED, false);
  end(absl::InvalidArgumentError(""), v1::FINISH_REASON_UNSPECIFIED, false);
  end(WithReason(absl::ResourceExhaustedError(""), kReasonOverloaded),
      v1::FINISH_REASON_UNSPECIFIED, false);
  end(WithReason(absl::ResourceExhaustedError(""), kReasonSlowReader),
      v1::FINISH_REASON_UNSPECIFIED, true);
  const std::string text = registry.Scrape();
  for (const char* line :
       {R"(weft_router_requests_total{model_name="m",outcome="OK",reason="stop"} 1)",
        R"(weft_router_requests_total{model_name="m",outcome="OK",reason="length"} 1)",
        R"(weft_router_requests_total{model_name="m",outcome="OK",reason="abort"} 1)",
        R"(weft_router_requests_total{model_name="m",outcome="UNAVAILABLE",reason="RANK_LOST"} 2)",
        R"(weft_router_requests_total{model_name="m",outcome="CANCELLED",reason="none"} 1)",
        R"(outcome="INVALID_ARGUMENT",reason="none"} 1)",
        R"(outcome="RESOURCE_EXHAUSTED",reason="OVERLOADED"} 1)",
        R"(outcome="RESOURCE_EXHAUSTED",reason="SLOW_READER"} 1)",
        R"(weft_router_rejects_total{model_name="m",reason="INVALID_ARGUMENT"} 1)",
        R"(weft_router_rejects_total{model_name="m",reason="OVERLOADED"} 1)"}) {
    EXPECT_THAT(text, HasSubstr(std::string(line) + "\n"));
  }
  EXPECT_THAT(text, Not(HasSubstr(R"(rejects_total{model_name="m",reason="SLOW_READER"})")));
}

// A router with all its parts, and what a scrape of it says.
class RouterMetricsServiceTest : public ::testing::Test {
 protected:
  void StartRouter(std::vector<std::string> addresses) {
    ClusterOptions options;
    options.addresses = std::move(addresses);
    options.link.connect = [](const std::string& address) {
      return NewGrpcLeaderClient(address, {});
    };
    cluster_ = std::make_unique<Cluster>(options);
    context_.cluster = cluster_.get();
    context_.text_pool = &text_pool_;
    context_.metrics = &metrics_;
    context_.registry = &requests_;
    reader_ = metrics_.Read(*cluster_, text_pool_);
    const std::string address = UniqueAddress("router");
    auto server = GrpcServer::Start({.listen_addresses = {address}}, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = v1::Inference::NewStub(NewGrpcChannel(address));
  }
  void TearDown() override {
    server_ = nullptr;
    reader_ = nullptr;
    cluster_ = nullptr;
  }

  void AwaitScrape(std::string_view line) {
    const std::string wanted(line);
    while (registry_.Scrape().find(wanted) == std::string::npos) {
      absl::SleepFor(absl::Milliseconds(5));  // ctest's timeout ends it
    }
  }
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> Ask(grpc::ClientContext& context) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(5);
    return stub_->Generate(&context, request);
  }

  MetricRegistry registry_{"m"};
  RouterMetrics metrics_{registry_};
  RequestRegistry requests_{1000};
  GenerateContext context_;
  std::unique_ptr<Cluster> cluster_;
  TextPool text_pool_{1, 8};
  RouterService service_{context_};
  std::unique_ptr<MetricRegistry::Reader> reader_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(RouterMetricsServiceTest, CountsPlacementsRetriesAndWhatIsInFlight) {
  const std::string first = UniqueAddress("first");
  const std::string second = UniqueAddress("second");
  FakeWorker draining(first);
  FakeWorker good(second);
  draining.RefuseCalls(WithReason(absl::UnavailableError("drains"), kReasonDraining));
  StartRouter({first, second});
  AwaitScrape("weft_router_groups_ready{model_name=\"m\"} 2\n");

  grpc::ClientContext context;
  const auto stream = Ask(context);
  const auto call = good.TakeCall();
  const std::string text = registry_.Scrape();
  EXPECT_THAT(text, HasSubstr("weft_router_groups{model_name=\"m\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("weft_router_requests_in_flight{model_name=\"m\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weft_router_retries_total{model_name=\"m\"} 1\n"));
  for (const std::string& group : {first, second}) {
    EXPECT_THAT(text,
                HasSubstr(fmt::format(
                    "weft_router_placements_total{{model_name=\"m\",group=\"{}\"}} 1\n", group)));
  }
  call->Send({6}, v1::FINISH_REASON_LENGTH);
  call->End();
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
  AwaitScrape("outcome=\"OK\",reason=\"length\"} 1\n");
  AwaitScrape("weft_router_requests_in_flight{model_name=\"m\"} 0\n");
}

TEST_F(RouterMetricsServiceTest, ShowsWhatWaitsForAThreadAndForAGroup) {
  StartRouter({UniqueAddress("nobody")});
  Mutex mutex;
  mutex.Lock();  // the pool's one thread waits for it
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(text_pool_.Submit([&mutex] { MutexLock lock(mutex); }).ok());
  }
  AwaitScrape("weft_router_queued_requests{model_name=\"m\",stage=\"tokenize\"} 2\n");
  mutex.Unlock();
  AwaitScrape("weft_router_queued_requests{model_name=\"m\",stage=\"tokenize\"} 0\n");

  grpc::ClientContext context;
  const auto stream = Ask(context);
  AwaitScrape("weft_router_queued_requests{model_name=\"m\",stage=\"place\"} 1\n");
  EXPECT_THAT(registry_.Scrape(), HasSubstr("weft_router_groups_ready{model_name=\"m\"} 0\n"));
  context.TryCancel();
  EXPECT_FALSE(stream->Finish().ok());
  AwaitScrape("outcome=\"CANCELLED\",reason=\"none\"} 1\n");
}

TEST_F(RouterMetricsServiceTest, ACallPastItsDeadlineIsNoCancelledOne) {
  StartRouter({UniqueAddress("nobody")});
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  const auto call = Ask(context);
  AwaitScrape("weft_router_requests_in_flight{model_name=\"m\"} 1\n");  // the router has it
  EXPECT_EQ(call->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  AwaitScrape("outcome=\"DEADLINE_EXCEEDED\",reason=\"none\"} 1\n");
}

}  // namespace
}  // namespace weft
