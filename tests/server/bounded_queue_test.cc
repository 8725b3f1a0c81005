#include "server/bounded_queue.h"

#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(BoundedQueueTest, RefusesTheItemAfterTheLastAllowedUntilDrained) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.TryPush(1));
  EXPECT_TRUE(queue.TryPush(2));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.size(), 2);
  std::vector<int> out = {99};
  queue.WaitFor(absl::ZeroDuration());
  queue.Drain(out);
  EXPECT_THAT(out, ElementsAre(1, 2));
  EXPECT_TRUE(queue.TryPush(4));
  queue.WaitFor(absl::InfiniteDuration());
  queue.Drain(out);
  EXPECT_THAT(out, ElementsAre(4));
  queue.WaitFor(absl::ZeroDuration());
  queue.Drain(out);
  EXPECT_THAT(out, IsEmpty());
  queue.WaitFor(absl::Milliseconds(1));
  queue.Drain(out);
  EXPECT_THAT(out, IsEmpty());
}

TEST(BoundedQueueTest, AWakeBeforeTheWaitIsNotLostAndIsUsedUp) {
  BoundedQueue<int> queue(1);
  std::vector<int> out;
  queue.Wake();
  queue.WaitFor(absl::InfiniteDuration());
  queue.Drain(out);
  EXPECT_THAT(out, IsEmpty());
  std::thread waker([&] { queue.Wake(); });
  queue.WaitFor(absl::InfiniteDuration());
  queue.Drain(out);
  waker.join();
  EXPECT_THAT(out, IsEmpty());
}

TEST(BoundedQueueTest, EveryAcceptedItemArrivesOnceAndInItsProducersOrder) {
  constexpr int kProducers = 4;
  constexpr int kItems = 5000;
  BoundedQueue<std::pair<int, int>> queue(16);
  std::vector<std::thread> producers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&queue, p] {
      for (int i = 0; i < kItems; ++i) {
        while (!queue.TryPush({p, i})) std::this_thread::yield();
      }
    });
  }
  std::map<int, int> next;
  std::vector<std::pair<int, int>> out;
  for (int seen = 0; seen < kProducers * kItems; seen += static_cast<int>(out.size())) {
    queue.WaitFor(absl::InfiniteDuration());
    queue.Drain(out);
    for (const auto& [producer, item] : out) EXPECT_EQ(item, next[producer]++);
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_EQ(queue.size(), 0);
}

}  // namespace
}  // namespace weft
