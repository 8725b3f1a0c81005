#include "kernels/device/thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace weft::kernels {
namespace {

TEST(ThreadPoolTest, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const std::int64_t tasks : {0, 1, 2, 3, 7, 1000}) {
      std::vector<int> runs(static_cast<std::size_t>(tasks));  // unguarded: one thread an index
      pool.ParallelFor(tasks, [&](std::int64_t index, int thread) {
        ASSERT_GE(thread, 0);
        ASSERT_LT(thread, threads);
        ++runs[static_cast<std::size_t>(index)];
      });
      for (const int count : runs) ASSERT_EQ(count, 1);
    }
  }
}

// What a job wrote is there when it returns, and the next job's tasks see it.
TEST(ThreadPoolTest, JobsFollowEachOther) {
  ThreadPool pool(4);
  std::vector<std::int64_t> values(64);
  for (int round = 0; round < 3000; ++round) {
    const std::int64_t tasks = 1 + round % 64;
    pool.ParallelFor(tasks, [&](std::int64_t index, int /*thread*/) {
      values[static_cast<std::size_t>(index)] += 1;
    });
  }
  std::int64_t total = 0;
  for (const std::int64_t value : values) total += value;
  std::int64_t want = 0;
  for (int round = 0; round < 3000; ++round) want += 1 + round % 64;
  EXPECT_EQ(total, want);
}

// The watchdog of a rank must not take one long job for a stall.
TEST(ThreadPoolTest, EveryTaskIsASignOfLife) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::uint64_t seen = pool.num_claims();
    for (const std::int64_t tasks : {1, 2, 7}) {
      pool.ParallelFor(tasks, [&](std::int64_t /*index*/, int thread) {
        if (thread != 0) return;
        const std::uint64_t now = pool.num_claims();
        EXPECT_NE(now, seen);
        seen = now;
      });
    }
  }
}

TEST(ThreadPoolTest, WakesAfterSleep) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> runs = 0;
    pool.ParallelFor(10, [&](std::int64_t /*index*/, int /*thread*/) {
      ++runs;
      // Long enough for the caller to sleep as well, in some rounds.
      if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    ASSERT_EQ(runs.load(), 10);
  }
}

// Ranks share cores: many pools at once, each with more threads than there are cores.
TEST(ThreadPoolTest, ManyPoolsShareTheCores) {
  std::vector<std::thread> ranks;
  std::atomic<int> right = 0;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&] {
      ThreadPool pool(4);
      for (int round = 0; round < 500; ++round) {
        std::atomic<std::int64_t> sum = 0;
        pool.ParallelFor(8, [&](std::int64_t index, int /*thread*/) { sum += index; });
        if (sum.load() != 28) return;
      }
      ++right;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(right.load(), 4);
}

TEST(ThreadPoolTest, EndsWhileWorkersSpinOrSleep) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(4);
    if (round % 2 == 0) pool.ParallelFor(4, [](std::int64_t /*index*/, int /*thread*/) {});
    if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace
}  // namespace weft::kernels
