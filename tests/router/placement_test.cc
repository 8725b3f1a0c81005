// The parts that placement is made of: what they decide, without a cluster.
#include <chrono>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/fair_queue.h"
#include "router/group_window.h"
#include "router/recent_count.h"
#include "router/retry_budget.h"

namespace weft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;

RecentCount::Clock::time_point At(double s) {
  return RecentCount::Clock::time_point(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(s)));
}

TEST(RecentCountTest, ForgetsWhatIsTenSecondsOld) {
  RecentCount count;
  count.Add(At(100));
  count.Add(At(100.9));
  count.Add(At(105));
  EXPECT_EQ(count.Sum(At(109.9)), 3);
  EXPECT_EQ(count.Sum(At(110)), 1);
  EXPECT_EQ(count.Sum(At(114.9)), 1);
  EXPECT_EQ(count.Sum(At(115)), 0);
  count.Add(At(1000));
  EXPECT_EQ(count.Sum(At(1009)), 1);
  EXPECT_EQ(count.Sum(At(5000)), 0);
}

TEST(RetryBudgetTest, AllowsARatioOfRecentRequestsAndAMinimum) {
  RetryBudget budget({.ratio = 0.2, .min_retries = 2});
  const auto retries = [&budget](double s) {
    int count = 0;
    for (; budget.CanRetry(At(s)); ++count) budget.OnRetry(At(s));
    return count;
  };
  EXPECT_EQ(retries(1), 2);
  for (int i = 0; i < 50; ++i) budget.OnRequest(At(2));
  EXPECT_EQ(retries(3), 10);
  EXPECT_EQ(retries(10), 0);
  EXPECT_EQ(retries(11), 2);  // those of the first second are forgotten
  EXPECT_EQ(retries(13), 0);  // the requests, and what they allowed, too
  EXPECT_EQ(retries(21), 2);
}

TEST(RetryBudgetTest, ZeroAllowsNone) {
  RetryBudget budget({.ratio = 0, .min_retries = 0});
  for (int i = 0; i < 50; ++i) budget.OnRequest(At(2));
  EXPECT_FALSE(budget.CanRetry(At(2)));
}

TEST(GroupWindowTest, AfterARefusalOneGoesInForOneThatEnds) {
  GroupWindow window(milliseconds(100), milliseconds(1000));
  EXPECT_TRUE(window.Open(1000));
  for (int in_flight = 9; in_flight >= 4; --in_flight) window.OnOverload(in_flight, At(1));
  EXPECT_FALSE(window.Open(4));
  EXPECT_TRUE(window.Open(3));
}

TEST(GroupWindowTest, TriesOneMoreAfterABackoffThatDoublesWhileItIsRefused) {
  GroupWindow window(milliseconds(100), milliseconds(300));
  window.OnOverload(4, At(1));
  EXPECT_FALSE(window.Grow(4, At(1.09)));
  EXPECT_FALSE(window.Grow(3, At(1.1))) << "there is room as it is";
  EXPECT_TRUE(window.Grow(4, At(1.1)));
  EXPECT_TRUE(window.Open(4));
  EXPECT_FALSE(window.Open(5));
  window.OnOverload(4, At(1.11));
  EXPECT_FALSE(window.Open(4));
  double next = 1.31;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(window.Grow(4, At(next - 0.01)));
    ASSERT_TRUE(window.Grow(4, At(next + 0.001)));
    window.OnOverload(4, At(next + 0.01));
    next += 0.31;
  }
}

TEST(GroupWindowTest, OpensWhollyWhenNothingIsRefusedAnyMore) {
  GroupWindow window(milliseconds(100), milliseconds(1000));
  window.OnOverload(0, At(0));
  std::int64_t in_flight = 0;
  std::vector<std::int64_t> seen;
  for (double s = 0; s < 2; s += 0.05) {
    window.Grow(in_flight, At(s));
    while (window.Open(in_flight) && in_flight < 300) ++in_flight;
    if (seen.empty() || seen.back() != in_flight) seen.push_back(in_flight);
  }
  EXPECT_THAT(seen, ElementsAre(0, 1, 3, 7, 15, 31, 63, 127, 300));
}

using Queue = FairQueue<std::string>;

std::vector<std::string> ServeAll(Queue& queue) {
  std::vector<std::string> order;
  queue.Scan([&order](std::string& item) {
    order.push_back(item);
    return Queue::Verdict::kServed;
  });
  return order;
}

TEST(FairQueueTest, PriorityComesFirstThenArrival) {
  Queue queue;
  queue.Push(1, "", 10, "a");
  queue.Push(0, "", 10, "b");
  queue.Push(1, "", 1, "c");
  queue.Push(0, "", 1, "d");
  queue.Push(-1, "", 100, "e");
  EXPECT_THAT(ServeAll(queue), ElementsAre("e", "b", "d", "a", "c"));
  EXPECT_TRUE(queue.empty());
}

TEST(FairQueueTest, TenantsAreServedAtEqualCost) {
  Queue queue;
  for (int i = 0; i < 6; ++i) queue.Push(0, "many", 10, "m" + std::to_string(i));
  queue.Push(0, "few", 10, "f0");
  queue.Push(0, "large", 30, "l0");
  queue.Push(0, "few", 10, "f1");
  queue.Push(0, "large", 30, "l1");
  EXPECT_THAT(ServeAll(queue),
              ElementsAre("m0", "f0", "l0", "m1", "f1", "m2", "m3", "l1", "m4", "m5"));
}

TEST(FairQueueTest, WhoComesLateIsNotBehindWhatOthersHavePiledUp) {
  Queue queue;
  for (int i = 0; i < 8; ++i) queue.Push(0, "many", 10, "m" + std::to_string(i));
  int served = 0;
  queue.Scan(
      [&](std::string&) { return served++ < 4 ? Queue::Verdict::kServed : Queue::Verdict::kStop; });
  queue.Push(0, "late", 10, "l0");
  queue.Push(0, "late", 10, "l1");
  // Nor before: what it did not ask for in time it does not get twice of.
  EXPECT_THAT(ServeAll(queue), ElementsAre("l0", "m4", "l1", "m5", "m6", "m7"));
}

TEST(FairQueueTest, WhatCannotBeServedHoldsUpNothing) {
  Queue queue;
  for (const char* item : {"a", "b", "c", "d"}) queue.Push(0, "", 1, item);
  queue.Scan([](std::string& item) {
    return item == "b"   ? Queue::Verdict::kRemove
           : item == "d" ? Queue::Verdict::kServed
                         : Queue::Verdict::kKeep;
  });
  EXPECT_THAT(ServeAll(queue), ElementsAre("a", "c"));
}

TEST(FairQueueTest, AFullQueueDropsTheLastOfWhoHasMost) {
  Queue queue;
  for (int i = 0; i < 3; ++i) queue.Push(0, "many", 10, "m" + std::to_string(i));
  const auto any = [](const std::string&) { return true; };
  EXPECT_EQ(queue.CountBefore(0, "many"), 3);
  EXPECT_EQ(queue.CountBefore(0, "few"), 1);
  EXPECT_EQ(queue.CountBefore(1, "few"), 3);
  EXPECT_EQ(queue.CountBefore(-1, "few"), 0);
  EXPECT_EQ(queue.PopLastFor(0, "many", any), std::nullopt);
  EXPECT_EQ(queue.PopLastFor(1, "few", any), std::nullopt);
  EXPECT_EQ(queue.PopLastFor(0, "few", any), "m2");
  EXPECT_EQ(queue.PopLastFor(-1, "many", [](const std::string& item) { return item != "m1"; }),
            "m0");
  EXPECT_THAT(ServeAll(queue), ElementsAre("m1"));
}

}  // namespace
}  // namespace weft
