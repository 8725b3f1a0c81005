#include "worker/engine/scheduler.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/engine_harness.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

EngineOptions Options() {
  return {.block_size = 4,
          .num_blocks = 100,
          .max_model_len = 400,
          .max_num_seqs = 8,
          .max_num_batched_tokens = 64,
          .async_scheduling = false};
}

EngineOptions SmallPool() {
  EngineOptions options = Options();
  options.num_blocks = 4;
  options.max_model_len = 16;
  return options;
}

// Two sequences of 8 tokens that fill SmallPool(): their next rows need a block each.
void FillSmallPool(EngineHarness& harness) {
  for (int step = 0; step < 5; ++step) ASSERT_EQ(harness.Step().size(), 2u);
  ASSERT_EQ(harness.engine->Stats().num_free_blocks, 0);
  ASSERT_EQ(harness.engine->Stats().num_preemptions, 0u);
}

TEST(SchedulerTest, PreemptsYoungestWhenBlocksRunOut) {
  EngineHarness harness(SmallPool());
  harness.Add(1, 4);
  harness.Add(2, 4);
  FillSmallPool(harness);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
  const EngineStats stats = harness.engine->Stats();
  EXPECT_EQ(stats.num_preemptions, 1u);
  EXPECT_EQ(stats.num_running, 1);
  EXPECT_EQ(stats.num_waiting, 1);
  EXPECT_EQ(stats.num_free_blocks, 1);  // two came back, one was needed
}

TEST(SchedulerTest, PreemptsTheLeastImportantPriorityBeforeTheYoungest) {
  EngineHarness harness(SmallPool());
  harness.Add(1, 4, /*priority=*/1);
  harness.Add(2, 4, /*priority=*/0);
  FillSmallPool(harness);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 1)));
}

TEST(SchedulerTest, PreemptsTheSequenceItselfWhenItIsTheYoungest) {
  EngineHarness harness(SmallPool());
  harness.Add(1, 3);
  harness.Add(2, 4);
  // 1 is one token behind: it is 2 that needs the block first.
  for (int step = 0; step < 5; ++step) ASSERT_EQ(harness.Step().size(), 2u);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
}

TEST(SchedulerTest, PreemptedGoesBackToTheHeadOfTheQueueAndIsRecomputed) {
  EngineOptions options = SmallPool();
  options.max_num_seqs = 2;
  options.enable_prefix_caching = false;
  EngineHarness harness(options);
  harness.Add(1, 4);
  harness.Add(2, 4);
  harness.Add(3, 1);
  FillSmallPool(harness);
  ASSERT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
  harness.Cancel(1);
  // Its prompt and the five tokens it had; then the one behind it.
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 9)));
  const PlanSequence& sequence = harness.plan->sequences[0];
  EXPECT_EQ(sequence.first_position, 0);
  EXPECT_EQ(sequence.num_sampled, 1);
  EXPECT_THAT(harness.plan->token_ids, ElementsAre(2, 3, 3, 3, 1, 1, 1, 1, 1));
  EXPECT_EQ(harness.engine->Stats().num_waiting, 1);
}

TEST(SchedulerTest, PreemptedMakesProgressBeforeItIsPreemptedAgain) {
  for (bool async : {false, true}) {
    EngineOptions options = Options();
    options.force_preemption_every = 1;
    options.max_num_batched_tokens = 4;
    options.async_scheduling = async;
    EngineHarness harness(options);
    harness.Add(1, 6);
    harness.Add(2, 7);
    std::map<RequestId, std::int32_t> seen;
    for (int step = 0; step < 200; ++step) {
      harness.Step();
      if (async) harness.StepAhead();
      for (const TokenEvent& event : harness.Events()) {
        // Before its first token it may lose a prompt that was only begun.
        const bool first = seen.emplace(event.id, event.num_preemptions).second;
        EXPECT_TRUE(first || event.num_preemptions <= seen[event.id] + 1) << "step " << step;
        seen[event.id] = event.num_preemptions;
      }
    }
    EXPECT_GT(seen[RequestId{1}], 2);
    EXPECT_GT(seen[RequestId{2}], 2);
  }
}

TEST(SchedulerTest, AdmissionNeedsTheWholePromptAndOneMoreBlock) {
  EngineOptions options = Options();
  options.num_blocks = 5;
  options.max_model_len = 20;
  for (const auto& [prompt_tokens, fits] : {std::pair(12, true), std::pair(13, false)}) {
    EngineHarness harness(options);
    harness.Add(1, 3);
    ASSERT_THAT(harness.Step(), ElementsAre(Pair(1, 3)));  // holds 1 block, 4 are free
    harness.Add(2, prompt_tokens);
    EXPECT_EQ(harness.Step().contains(2), fits) << prompt_tokens;
  }
}

TEST(SchedulerTest, AdmissionStaysAboveTheWatermark) {
  EngineOptions options = Options();
  options.num_blocks = 200;  // the watermark is 2 blocks
  options.max_model_len = 800;
  for (const auto& [num_blocks, fits] : {std::pair(196, true), std::pair(197, false)}) {
    EngineHarness harness(options);
    harness.Add(1, 3);
    ASSERT_THAT(harness.Step(), ElementsAre(Pair(1, 3)));  // 199 are free
    harness.Add(2, num_blocks * 4);
    EXPECT_EQ(harness.Step().contains(2), fits) << num_blocks;
  }
}

TEST(SchedulerTest, ALoneRequestMayFillThePool) {
  EngineOptions options = Options();
  options.num_blocks = 3;
  options.max_model_len = 12;
  EngineHarness harness(options);
  harness.Add(1, 11);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 11)));
  harness.Step();
  EXPECT_EQ(harness.LastEvent(1).finish, FinishReason::kLength);
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 3);
}

TEST(SchedulerTest, NobodyOvertakesTheHeadOfTheQueue) {
  EngineOptions options = SmallPool();
  EngineHarness harness(options);
  harness.Add(1, 3);
  harness.Step();
  harness.Add(2, 12);  // needs three blocks and one more; three are free
  harness.Add(3, 1);   // would fit
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
  harness.Cancel(1);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 12)));
}

TEST(SchedulerTest, MorePromptsThanSlotsWait) {
  EngineOptions options = Options();
  options.max_num_seqs = 2;
  EngineHarness harness(options);
  for (int id = 1; id <= 3; ++id) harness.Add(id, 2);
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(1, 2), Pair(2, 2)));
  harness.Cancel(1);
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(2, 1), Pair(3, 2)));
}

TEST(SchedulerTest, DecodesAndAPrefillChunkShareAStep) {
  EngineOptions options = Options();
  options.max_num_batched_tokens = 8;
  EngineHarness harness(options);
  harness.Add(1, 2);
  harness.Step();
  harness.Add(2, 16);
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(1, 1), Pair(2, 7)));
  EXPECT_EQ(harness.plan->num_sampled_rows(), 1);
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(1, 1), Pair(2, 7)));
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(1, 1), Pair(2, 2)));
  EXPECT_EQ(harness.plan->num_sampled_rows(), 2);
}

TEST(SchedulerTest, PromptsRunByPriorityThenArrival) {
  EngineOptions options = Options();
  options.max_num_batched_tokens = 4;
  EngineHarness harness(options);
  harness.Add(1, 8, /*priority=*/1);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 4)));
  harness.Add(2, 5, /*priority=*/1);
  harness.Add(3, 4, /*priority=*/0);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(3, 4)));
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(3, 1), Pair(1, 3)));
  EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(3, 1), Pair(1, 1), Pair(2, 2)));
}

// Decodes of `num_decodes` sequences, all past their prompts.
void StartDecodes(EngineHarness& harness, int num_decodes) {
  for (int id = 1; id <= num_decodes; ++id) harness.Add(id, 1);
  // Until each had its prompt's row.
  while (static_cast<int>(harness.engine->Stats().generation_tokens) < num_decodes ||
         harness.engine->Stats().num_waiting > 0) {
    harness.Step();
  }
}

TEST(SchedulerTest, DecodesTakeTurnsWhenTheyExceedTheBudget) {
  EngineOptions options = Options();
  options.max_num_batched_tokens = 2;
  EngineHarness harness(options);
  StartDecodes(harness, 5);
  std::map<std::uint64_t, int> turns;
  for (int step = 0; step < 10; ++step) {
    const EngineHarness::Rows rows = harness.Step();
    EXPECT_EQ(rows.size(), 2u);
    for (const auto& [id, num_rows] : rows) turns[id] += num_rows;
  }
  EXPECT_THAT(turns, ElementsAre(Pair(1, 4), Pair(2, 4), Pair(3, 4), Pair(4, 4), Pair(5, 4)));
}

TEST(SchedulerTest, NeitherDecodesNorPrefillsStarve) {
  for (int budget = 1; budget <= 8; ++budget) {
    SCOPED_TRACE(testing::Message() << "budget " << budget);
    EngineOptions options = Options();
    options.max_num_batched_tokens = budget;
    options.num_blocks = 1000;
    options.max_model_len = 1000;
    EngineHarness harness(options);
    StartDecodes(harness, 7);
    harness.Add(8, 900);
    std::map<std::uint64_t, int> turns;
    for (int step = 0; step < 100; ++step) {
      const EngineHarness::Rows rows = harness.Step();
      std::int32_t total = 0;
      for (const auto& [id, num_rows] : rows) {
        turns[id] += num_rows;
        total += num_rows;
      }
      EXPECT_EQ(total, budget) << "rows left unused";
    }
    EXPECT_GE(turns[8], 100 * budget / 4);
    for (int id = 1; id <= 7; ++id) {
      // Three quarters of the rows or a row a step, in turns.
      EXPECT_GE(turns[id], std::min(100, 100 * budget * 3 / 4 / 7 - 1)) << "decode " << id;
    }
  }
}

TEST(SchedulerTest, TableDeltasHoldNewBlocksOnly) {
  EngineHarness harness(Options());
  harness.Add(1, 6);
  harness.Step();
  ASSERT_EQ(harness.plan->table_deltas.size(), 1u);
  EXPECT_EQ(harness.plan->table_deltas[0].first_index, 0);
  EXPECT_EQ(harness.plan->table_deltas[0].num_blocks, 2);
  EXPECT_EQ(harness.plan->sampling_deltas.size(), 1u);
  for (std::int64_t position = 6; position < 30; ++position) {
    harness.Step();
    EXPECT_THAT(harness.plan->sampling_deltas, IsEmpty());
    EXPECT_EQ(harness.plan->sequences[0].first_position, position);
    if (position % 4 != 0) {
      EXPECT_THAT(harness.plan->table_deltas, IsEmpty());
      continue;
    }
    ASSERT_EQ(harness.plan->table_deltas.size(), 1u);
    EXPECT_EQ(harness.plan->table_deltas[0].first_index, position / 4);
    EXPECT_EQ(harness.plan->table_deltas[0].num_blocks, 1);
  }
}

TEST(SchedulerTest, ATakenOverSlotIsRewrittenFromItsStart) {
  EngineOptions options = Options();
  options.max_num_seqs = 1;
  EngineHarness harness(options);
  harness.Add(1, 9);
  harness.Step();
  harness.Add(2, 2);
  harness.Cancel(1);
  ASSERT_THAT(harness.Step(), ElementsAre(Pair(2, 2)));
  ASSERT_EQ(harness.plan->table_deltas.size(), 1u);
  EXPECT_EQ(harness.plan->table_deltas[0].slot, 0);
  EXPECT_EQ(harness.plan->table_deltas[0].first_index, 0);
  EXPECT_EQ(harness.plan->table_deltas[0].num_blocks, 1);
  ASSERT_EQ(harness.plan->sampling_deltas.size(), 1u);
  EXPECT_EQ(harness.plan->sampling_deltas[0].params.seed, 2u);
}

TEST(SchedulerTest, WithoutAsyncOneStepIsInFlight) {
  EngineHarness harness(Options());
  harness.Add(1, 2);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 2)));
  EXPECT_THAT(harness.StepAhead(), IsEmpty());
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
}

EngineOptions AsyncOptions() {
  EngineOptions options = Options();
  options.async_scheduling = true;
  return options;
}

TEST(SchedulerTest, AsyncRowsReferToTheTokensOfTheStepInFlight) {
  EngineHarness harness(AsyncOptions());
  harness.Add(1, 2);
  harness.Add(2, 3);
  harness.Step();
  EXPECT_THAT(harness.StepAhead(), UnorderedElementsAre(Pair(1, 1), Pair(2, 1)));
  EXPECT_THAT(harness.plan->token_ids, ElementsAre(~0, ~1));
  EXPECT_EQ(harness.plan->sequences[0].first_position, 2);
  EXPECT_THAT(harness.StepAhead(), IsEmpty()) << "three steps in flight";
  harness.Cancel(1);
  harness.Step();
  // 2 was the second sampled row of the step now in flight.
  EXPECT_THAT(harness.plan->token_ids, ElementsAre(~1));
}

TEST(SchedulerTest, AsyncPlansNoRowPastTheLastToken) {
  EngineHarness harness(AsyncOptions());
  EngineRequest request = EngineHarness::Request(1, 2);
  request.max_tokens = 2;
  harness.Add(request);
  harness.Step();
  EXPECT_THAT(harness.StepAhead(), ElementsAre(Pair(1, 1)));
  EXPECT_THAT(harness.Step(), IsEmpty());
  EXPECT_THAT(harness.Step(), IsEmpty());
  EXPECT_EQ(harness.LastEvent(1).finish, FinishReason::kLength);
}

TEST(SchedulerTest, AsyncDropsTheRowPlannedAfterTheEnd) {
  EngineHarness harness(AsyncOptions());
  EngineRequest request = EngineHarness::Request(1, 2);
  request.eos_token_ids = {1};
  harness.Add(request);
  harness.Step();
  EXPECT_THAT(harness.StepAhead(), ElementsAre(Pair(1, 1)));
  EXPECT_THAT(harness.Step(), IsEmpty());
  EXPECT_EQ(harness.Events().size(), 1u);
  // Its blocks are back: the next plan runs after the row in flight on every rank.
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 100);
  EXPECT_THAT(harness.Step(), IsEmpty());
  EXPECT_THAT(harness.Events(), IsEmpty());
}

TEST(SchedulerTest, NobodyIsPreemptedForBlocksThatComeBackByThemselves) {
  for (bool async : {false, true}) {
    EngineOptions options = SmallPool();
    options.async_scheduling = async;
    EngineHarness harness(options);
    EngineRequest ending = EngineHarness::Request(1, 8);
    ending.max_tokens = 2;
    harness.Add(ending);  // takes two blocks, and a third for its last row
    harness.Add(2, 4);    // takes the fourth, and needs one more for its second row
    EXPECT_THAT(harness.Step(), UnorderedElementsAre(Pair(1, 8), Pair(2, 4)));
    EXPECT_THAT(async ? harness.StepAhead() : harness.Step(), ElementsAre(Pair(1, 1)));
    harness.Step();
    EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 1)));
    EXPECT_EQ(harness.engine->Stats().num_preemptions, 0u);
  }
}

}  // namespace
}  // namespace weft
