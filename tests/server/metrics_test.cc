#include "server/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics_server.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr CounterSpec kDone = {"weft_test_done_total", "Things done"};
constexpr GaugeSpec kLeft = {"weft_test_left", "Things left"};
constexpr double kBuckets[] = {0.5, 1};
constexpr HistogramSpec kTime = {"weft_test_time_seconds", "Of a thing", kBuckets};

TEST(MetricRegistryTest, WritesCountedAndReadMetricsWithHelpTypeAndLabels) {
  MetricRegistry registry("m");
  registry.Get(kDone, {{"kind", "a"}}).Increment(2);
  registry.Get(kDone, {{"kind", "a"}}).Increment();  // the same one
  registry.Get(kTime).Observe(0.75);
  const auto reader = registry.AddReader([](MetricReadings& readings) {
    readings.Set(kLeft, 5, {{"rank", "0"}});
    readings.Set(kLeft, 6, {{"rank", "1"}});
  });
  const std::string text = registry.Scrape();
  EXPECT_THAT(text, HasSubstr("# HELP weft_test_done_total Things done\n"
                              "# TYPE weft_test_done_total counter\n"
                              "weft_test_done_total{model_name=\"m\",kind=\"a\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE weft_test_left gauge\n"
                              "weft_test_left{model_name=\"m\",rank=\"0\"} 5\n"
                              "weft_test_left{model_name=\"m\",rank=\"1\"} 6\n"));
  EXPECT_THAT(text, HasSubstr("weft_test_time_seconds_bucket{model_name=\"m\",le=\"0.5\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("weft_test_time_seconds_bucket{model_name=\"m\",le=\"1\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weft_test_time_seconds_count{model_name=\"m\"} 1\n"));
}

TEST(MetricRegistryTest, AReaderIsNotReadOnceItIsGone) {
  MetricRegistry registry("m");
  std::atomic<bool> alive = true;
  std::atomic<bool> stop = false;
  auto reader = registry.AddReader([&](MetricReadings& readings) {
    EXPECT_TRUE(alive);
    readings.Set(kLeft, 1);
  });
  std::thread scraper([&] {
    while (!stop) registry.Scrape();
  });
  EXPECT_THAT(registry.Scrape(), HasSubstr("weft_test_left"));
  reader = nullptr;
  alive = false;
  EXPECT_THAT(registry.Scrape(), Not(HasSubstr("weft_test_left")));
  stop = true;
  scraper.join();
}

TEST(MetricTableTest, BucketsGrow) {
  for (const HistogramSpec& spec :
       {metrics::kTimeToFirstToken, metrics::kInterTokenLatency, metrics::kE2eRequestLatency,
        metrics::kRequestPromptTokens, metrics::kIterationTokens}) {
    EXPECT_TRUE(std::is_sorted(spec.buckets.begin(), spec.buckets.end())) << spec.name;
    EXPECT_EQ(std::set<double>(spec.buckets.begin(), spec.buckets.end()).size(),
              spec.buckets.size())
        << spec.name;
  }
}

int Connect(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  return fd;
}

// What `request` brings, to the end of the connection.
std::string Exchange(const std::string& address, std::string_view request) {
  const int fd = Connect(address);
  EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t size = 0; (size = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<std::size_t>(size));
  }
  close(fd);
  return answer;
}

std::string Get(const MetricsServer& server, std::string_view path) {
  return Exchange(server.address(), fmt::format("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", path));
}

class MetricsServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = MetricsServer::Start("127.0.0.1", 0, registry_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  MetricRegistry registry_{"m"};
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, ServesTheRegistryAsPrometheusText) {
  registry_.Get(kDone).Increment();
  const std::string answer = Get(*server_, "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("\r\n\r\n# HELP weft_test_done_total"));
}

TEST_F(MetricsServerTest, ProbesSayWhatTheChecksSay) {
  EXPECT_THAT(Get(*server_, "/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get(*server_, "/readyz"), StartsWith("HTTP/1.1 503 "));
  server_->SetReadiness([] { return absl::OkStatus(); });
  server_->SetLiveness([] { return absl::UnavailableError("no progress for 4 s"); });
  EXPECT_THAT(Get(*server_, "/readyz"), StartsWith("HTTP/1.1 200 "));
  const std::string dead = Get(*server_, "/healthz");
  EXPECT_THAT(dead, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(dead, HasSubstr("\r\n\r\nno progress for 4 s\n"));
}

TEST_F(MetricsServerTest, ConnectionsThatSayNothingDoNotHoldUpAProbe) {
  int silent[8];
  for (int& fd : silent) fd = Connect(server_->address());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(Get(*server_, "/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
  for (const int fd : silent) close(fd);
}

TEST_F(MetricsServerTest, KnowsThreePathsAndTwoMethods) {
  for (const char* path : {"/", "/metric", "/metrics/x", "/../etc/passwd"}) {
    EXPECT_THAT(Get(*server_, path), HasSubstr(" 404 ")) << path;
  }
  const std::string address = server_->address();
  EXPECT_THAT(Exchange(address, "POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n"),
              StartsWith("HTTP/1.1 405 "));
  const std::string head = Exchange(address, "HEAD /healthz HTTP/1.1\r\n\r\n");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 "));
  EXPECT_TRUE(head.ends_with("\r\n\r\n")) << head;
}

TEST_F(MetricsServerTest, APortInUseIsAnErrorThatSaysWhatToDo) {
  const std::string address = server_->address();
  const int port = std::stoi(address.substr(address.find(':') + 1));
  const auto second = MetricsServer::Start("127.0.0.1", port, registry_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(),
            fmt::format("cannot serve metrics on {}: Address already in use (--metrics-port: 0 "
                        "picks a free one, -1 is none)",
                        address));
  EXPECT_EQ(MetricsServer::Start("no.such.host.invalid", 0, registry_).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(MetricsServerTest, NoServerWhenTheFlagsSayNone) {
  const auto none = MetricsServer::Start({.metrics_port = -1}, 9400, registry_);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, nullptr);
}

}  // namespace
}  // namespace weft
