#include "server/ticker.h"

#include <atomic>
#include <thread>

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(TickerTest, TicksUntilItIsDestroyedAndNotAfterwards) {
  std::atomic<int> ticks{0};
  {
    Ticker ticker(std::chrono::milliseconds(1), [&] { ++ticks; });
    while (ticks < 5) std::this_thread::yield();
  }
  const int at_the_end = ticks;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(ticks, at_the_end);
}

TEST(TickerTest, DestructionDoesNotWaitForTheInterval) {
  int ticks = 0;
  {
    const Ticker ticker(std::chrono::hours(1), [&] { ++ticks; });
  }
  EXPECT_EQ(ticks, 0);
}

}  // namespace
}  // namespace weft
