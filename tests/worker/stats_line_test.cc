#include "worker/stats_line.h"

#include "gtest/gtest.h"

namespace weft {
namespace {

TEST(StatsLineTest, SaysWhatHappenedSinceTheLastOne) {
  const absl::Time start = absl::UnixEpoch();
  StatsLine line(start);
  EngineStats stats = {.num_running = 3, .num_waiting = 2, .num_blocks = 8, .num_free_blocks = 6};
  stats.prompt_tokens = 100;
  stats.generation_tokens = 50;
  stats.steps = 20;
  EXPECT_EQ(line.Next(stats, start + absl::Seconds(10)),
            "prompt 10.0 tokens/s, generation 5.0 tokens/s, 3 running, 2 waiting, KV cache 25.0 %");
  stats.generation_tokens = 60;
  stats.steps = 30;
  stats.num_preemptions = 1;
  stats.prefix_cache_queries = 200;
  stats.prefix_cache_hits = 90;
  EXPECT_EQ(line.Next(stats, start + absl::Seconds(15)),
            "prompt 0.0 tokens/s, generation 2.0 tokens/s, 3 running, 2 waiting, KV cache 25.0 %, "
            "45.0 % of prompts cached, 1 preemptions");
}

TEST(StatsLineTest, AnIdleEngineIsSilentOnceItsLastStepsAreTold) {
  absl::Time now = absl::UnixEpoch();
  StatsLine line(now);
  EngineStats stats = {.num_blocks = 8, .num_free_blocks = 8};
  EXPECT_EQ(line.Next(stats, now += absl::Seconds(1)), std::nullopt);
  stats.steps = 1;
  EXPECT_NE(line.Next(stats, now += absl::Seconds(1)), std::nullopt);
  EXPECT_EQ(line.Next(stats, now += absl::Seconds(1)), std::nullopt);
  stats.num_waiting = 1;  // stuck, and no step: that is no silence
  EXPECT_NE(line.Next(stats, now += absl::Seconds(1)), std::nullopt);
}

}  // namespace
}  // namespace weft
