// What engine.h says of prefix caching, by requests of a few blocks.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/engine_harness.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

EngineOptions Options() {
  return {.block_size = 4,
          .num_blocks = 100,
          .max_model_len = 400,
          .max_num_seqs = 8,
          .max_num_batched_tokens = 64,
          .async_scheduling = false};
}

EngineRequest Request(std::uint64_t id, const std::vector<std::int32_t>& prompt,
                      std::int32_t max_tokens = 1) {
  EngineRequest request = EngineHarness::Request(id, 0);
  request.prompt_token_ids = prompt;
  request.max_tokens = max_tokens;
  return request;
}

std::vector<std::int32_t> Count(std::int32_t length) {
  std::vector<std::int32_t> tokens(length);
  for (std::int32_t i = 0; i < length; ++i) tokens[i] = i;
  return tokens;
}

// Runs it alone to its end; its last news.
TokenEvent RunAlone(EngineHarness& harness, EngineRequest request) {
  const std::uint64_t id = static_cast<std::uint64_t>(request.id);
  harness.Add(std::move(request));
  TokenEvent last;
  for (int step = 0; step < 1000 && last.finish == FinishReason::kNone; ++step) {
    harness.Step();
    for (const TokenEvent& event : harness.Events()) {
      EXPECT_EQ(event.id, RequestId{id});
      last = event;
    }
  }
  EXPECT_NE(last.finish, FinishReason::kNone);
  return last;
}

TEST(PrefixCacheTest, AFullHitStillComputesTheLastToken) {
  for (const auto& [length, cached] : std::vector<std::pair<int, int>>{
           {1, 0}, {3, 0}, {4, 0}, {5, 4}, {7, 4}, {8, 4}, {9, 8}, {12, 8}, {13, 12}}) {
    EngineHarness harness(Options());
    EXPECT_EQ(RunAlone(harness, Request(1, Count(length))).num_cached_tokens, 0);
    harness.Add(Request(2, Count(length)));
    EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, length - cached)));
    EXPECT_EQ(harness.plan->sequences[0].first_position, cached);
    EXPECT_EQ(harness.plan->sequences[0].num_sampled, 1);
    harness.Step();
    EXPECT_EQ(harness.LastEvent(2).num_cached_tokens, cached);
    const EngineStats stats = harness.engine->Stats();
    EXPECT_EQ(stats.prefix_cache_queries, 2u * length);
    EXPECT_EQ(stats.prefix_cache_hits, static_cast<std::uint64_t>(cached));
    EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
    EXPECT_EQ(stats.num_cached_blocks, length / 4);
  }
}

TEST(PrefixCacheTest, TokensThatWereGeneratedAreFound) {
  EngineHarness harness(Options());
  RunAlone(harness, Request(1, Count(6), /*max_tokens=*/7));  // 13 tokens, the last not computed
  std::vector<std::int32_t> next_turn = Count(6);
  next_turn.insert(next_turn.end(), 7, harness.next_token);
  next_turn.insert(next_turn.end(), {60, 61});
  harness.Add(Request(2, next_turn));
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 3)));
  EXPECT_EQ(harness.plan->sequences[0].first_position, 12);
}

TEST(PrefixCacheTest, OnlyEqualBeginningsAreFound) {
  EngineHarness harness(Options());
  RunAlone(harness, Request(1, Count(13)));
  std::vector<std::int32_t> prompt = Count(13);
  prompt[5] = 99;
  EXPECT_EQ(RunAlone(harness, Request(2, prompt)).num_cached_tokens, 4);
  prompt = Count(13);
  prompt[0] = 99;  // the blocks behind are equal, what is before them is not
  EXPECT_EQ(RunAlone(harness, Request(3, prompt)).num_cached_tokens, 0);
}

TEST(PrefixCacheTest, SaltsKeepRequestsApart) {
  EngineHarness harness(Options());
  RunAlone(harness, Request(1, Count(13)));
  for (int round = 0; round < 2; ++round) {
    EngineRequest salted = Request(2 + round, Count(13));
    salted.cache_salt = "a tenant's";
    EXPECT_EQ(RunAlone(harness, salted).num_cached_tokens, round == 0 ? 0 : 12);
  }
}

TEST(PrefixCacheTest, NothingIsFoundWhenItIsOff) {
  EngineOptions options = Options();
  options.enable_prefix_caching = false;
  EngineHarness harness(options);
  for (std::uint64_t id = 1; id <= 3; ++id) {
    EXPECT_EQ(RunAlone(harness, Request(id, Count(13), 5)).num_cached_tokens, 0);
  }
  EXPECT_THAT(harness.engine->TakeBlockChanges(), IsEmpty());
  const EngineStats stats = harness.engine->Stats();
  EXPECT_EQ(stats.prefix_cache_queries, 0u);
  EXPECT_EQ(stats.num_cached_blocks, 0);
}

TEST(PrefixCacheTest, APromptThatIsScoredIsComputedWhole) {
  EngineHarness harness(Options());
  RunAlone(harness, Request(1, Count(13)));
  EngineRequest request = Request(2, Count(13));
  LogitsParams params;
  params.prompt_logprobs = 1;
  request.logits = std::make_shared<const LogitsParams>(params);
  harness.Add(request);
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(2, 8)));  // max_num_seqs rows with logits a step
  EXPECT_EQ(harness.plan->sequences[0].first_position, 0);
  harness.Step();
  harness.Step();
  EXPECT_EQ(harness.LastEvent(2).num_cached_tokens, 0);
  EXPECT_EQ(harness.engine->Stats().prefix_cache_queries, 13u);  // of the first one alone
}

TEST(PrefixCacheTest, APreemptedRequestFindsItsOwnBlocks) {
  EngineOptions options = Options();
  options.force_preemption_every = 8;
  EngineHarness harness(options);
  harness.Add(Request(1, Count(6), 100));
  for (int step = 1; step < 8; ++step) harness.Step();
  // It has 6 + 7 tokens: three full blocks, and the last token is not computed yet.
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1)));
  EXPECT_EQ(harness.plan->sequences[0].first_position, 12);
  EXPECT_EQ(harness.engine->Stats().num_preemptions, 1u);
  EXPECT_EQ(harness.engine->Stats().prefix_cache_queries, 6u);  // counted when it came
}

TEST(PrefixCacheTest, SamplesThatComeTogetherComputeTheirPromptOnce) {
  EngineHarness harness(Options());
  for (std::uint64_t id = 1; id <= 3; ++id) harness.Add(Request(id, Count(14), 5));
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 14)));
  EXPECT_THAT(harness.Step(), ElementsAre(Pair(1, 1), Pair(2, 2), Pair(3, 2)));
  // Three blocks of them all, and one each.
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 100 - 6);
}

// Two that compute the same at once, because their prompts are scored, share it afterwards.
TEST(PrefixCacheTest, EqualBlocksBecomeOne) {
  EngineHarness harness(Options());
  LogitsParams params;
  params.prompt_logprobs = 0;
  for (std::uint64_t id = 1; id <= 2; ++id) {
    EngineRequest request = Request(id, Count(6), 20);
    request.logits = std::make_shared<const LogitsParams>(params);
    harness.Add(request);
  }
  harness.Step();
  harness.Step();
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 100 - 4);
  harness.Step();
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 100 - 3);
  ASSERT_EQ(harness.plan->table_deltas.size(), 1u);
  const BlockTableDelta& delta = harness.plan->table_deltas[0];
  EXPECT_EQ(harness.owners.at(delta.slot), 2u);
  EXPECT_EQ(delta.first_index, 0);
}

TEST(PrefixCacheTest, ABlockInUseIsNeverEvicted) {
  EngineOptions options = Options();
  options.num_blocks = 6;
  options.max_model_len = 24;
  EngineHarness harness(options);
  harness.Add(Request(1, Count(9), 4));  // three blocks, held
  harness.Step();
  std::vector<std::int32_t> other(8, 50);
  for (std::uint64_t id = 2; id <= 3; ++id) {
    other[0] = static_cast<std::int32_t>(60 + id);
    harness.Add(Request(id, other));
  }
  for (int step = 0; step < 10; ++step) harness.Step();
  EXPECT_GT(harness.engine->Stats().prefix_cache_evictions, 0u);
  EXPECT_EQ(harness.engine->Stats().num_free_blocks, 6);
}

// However far it came before somebody noticed: its prompt in chunks, tokens after it.
TEST(PrefixCacheTest, WhatWasNotANumberIsNotCached) {
  for (int good_steps = 1; good_steps < 12; ++good_steps) {
    SCOPED_TRACE(good_steps);
    EngineOptions options = Options();
    options.max_num_batched_tokens = 3;
    EngineHarness harness(options);
    harness.Add(Request(1, Count(9), 20));
    harness.Add(Request(2, Count(9), 3));  // has a part of it, too
    for (int step = 0; step < good_steps; ++step) harness.Step();
    harness.next_token = kNotANumber;
    for (int step = 0; step < 20; ++step) harness.Step();
    harness.Events();
    EXPECT_EQ(harness.engine->Stats().num_cached_blocks, 0);
    EXPECT_EQ(harness.engine->Stats().num_free_blocks, harness.engine->Stats().num_blocks);
    harness.next_token = 7;
    EXPECT_EQ(RunAlone(harness, Request(3, Count(9))).num_cached_tokens, 0);
    EXPECT_EQ(RunAlone(harness, Request(4, Count(9))).num_cached_tokens, 8) << "it is used again";
  }
}

}  // namespace
}  // namespace weft
