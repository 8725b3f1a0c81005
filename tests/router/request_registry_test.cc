#include "router/request_registry.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "router/generate_call.h"
#include "server/error_reason.h"

namespace weft {
namespace {

class RequestRegistryTest : public ::testing::Test {
 protected:
  std::shared_ptr<GenerateCall> Call() {
    return std::make_shared<GenerateCall>(context_, v1::GenerateRequest(),
                                          std::chrono::system_clock::time_point::max());
  }
  GenerateContext context_;
};

TEST_F(RequestRegistryTest, AnIdIsInUseUntilItIsRemoved) {
  RequestRegistry registry(10);
  const auto call = Call();
  EXPECT_TRUE(registry.Add("a", call).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(registry.Add("a", Call())));
  EXPECT_EQ(registry.Find("a"), call);
  EXPECT_EQ(registry.Find("b"), nullptr);
  EXPECT_EQ(registry.All().size(), 1);
  registry.Remove("a");
  registry.Remove("a");
  EXPECT_EQ(registry.Find("a"), nullptr);
  EXPECT_TRUE(registry.Add("a", call).ok());
}

TEST_F(RequestRegistryTest, OneMoreThanTheLimitIsOverloaded) {
  RequestRegistry registry(2);
  const auto call = Call();
  EXPECT_TRUE(registry.Add("a", call).ok());
  EXPECT_TRUE(registry.Add("b", call).ok());
  const absl::Status refused = registry.Add("c", call);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(ReasonOf(refused), kReasonOverloaded);
  registry.Remove("a");
  EXPECT_TRUE(registry.Add("c", call).ok());
}

TEST_F(RequestRegistryTest, ADrainRefusesAndWaitsForStreams) {
  RequestRegistry registry(2);
  registry.OpenStream();
  registry.StartDrain();
  const absl::Status refused = registry.Add("a", Call());
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_EQ(ReasonOf(refused), kReasonDraining);
  const auto now = std::chrono::steady_clock::now;
  EXPECT_FALSE(registry.WaitForNoStreams(now()));
  std::thread closer([&registry] { registry.CloseStream(); });
  EXPECT_TRUE(registry.WaitForNoStreams(now() + std::chrono::hours(1)));
  closer.join();
}

TEST_F(RequestRegistryTest, ThreadsMayAddFindAndRemoveAtOnce) {
  RequestRegistry registry(1000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const std::string id = std::to_string(t) + "/" + std::to_string(i);
        const auto call = Call();
        EXPECT_TRUE(registry.Add(id, call).ok());
        EXPECT_EQ(registry.Find(id), call);
        registry.All();
        registry.Remove(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(registry.All().empty());
}

}  // namespace
}  // namespace weft
