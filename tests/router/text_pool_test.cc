#include "router/text_pool.h"

#include <atomic>

#include "gtest/gtest.h"
#include "server/error_reason.h"

namespace weft {
namespace {

TEST(TextPoolTest, RunsEveryAcceptedJobBeforeItEnds) {
  std::atomic<int> accepted = 0;
  std::atomic<int> ran = 0;
  {
    TextPool pool(3, 1000);
    std::vector<std::thread> producers;
    for (int p = 0; p < 4; ++p) {
      producers.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) accepted += pool.Submit([&] { ++ran; }).ok();
      });
    }
    for (std::thread& producer : producers) producer.join();
  }
  EXPECT_EQ(ran, accepted);
  EXPECT_GT(accepted, 0);
}

TEST(TextPoolTest, RefusesMoreThanMayWait) {
  Mutex mutex;
  CondVar changed;
  bool running = false;
  bool go = false;
  TextPool pool(1, 2);
  ASSERT_TRUE(pool.Submit([&] {
                    MutexLock lock(mutex);
                    running = true;
                    changed.NotifyAll();
                    while (!go) changed.Wait(mutex);
                  })
                  .ok());
  {
    MutexLock lock(mutex);
    while (!running) changed.Wait(mutex);
  }
  EXPECT_TRUE(pool.Submit([] {}).ok());
  EXPECT_TRUE(pool.Submit([] {}).ok());
  const absl::Status third = pool.Submit([] {});
  EXPECT_TRUE(absl::IsResourceExhausted(third)) << third;
  EXPECT_EQ(ReasonOf(third), kReasonOverloaded);
  MutexLock lock(mutex);
  go = true;
  changed.NotifyAll();
}

}  // namespace
}  // namespace weft
