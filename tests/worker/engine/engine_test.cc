#include "worker/engine/engine.h"

#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/engine_harness.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

EngineOptions Options() {
  return {.block_size = 4,
          .num_blocks = 8,
          .max_model_len = 32,
          .max_num_seqs = 4,
          .max_num_batched_tokens = 64,
          .max_num_waiting = 4,
          .vocab_size = 100,
          .async_scheduling = false};
}

// Runs until `id` ends and returns all its events.
std::vector<TokenEvent> RunToEnd(EngineHarness& harness, std::uint64_t id) {
  std::vector<TokenEvent> events;
  for (int step = 0; step < 1000; ++step) {
    harness.Step();
    for (TokenEvent& event : harness.Events()) {
      if (event.id != RequestId{id}) continue;
      events.push_back(event);
      if (event.finish != FinishReason::kNone) return events;
    }
  }
  ADD_FAILURE() << "request " << id << " does not end";
  return events;
}

TEST(EngineTest, EndsAtMaxTokens) {
  EngineHarness harness(Options());
  EngineRequest request = EngineHarness::Request(1, 3);
  request.max_tokens = 5;
  harness.Add(request);
  const std::vector<TokenEvent> events = RunToEnd(harness, 1);
  ASSERT_THAT(events, SizeIs(5));
  EXPECT_EQ(events.back().finish, FinishReason::kLength);
  EXPECT_EQ(events.back().token_id, 1);
  EXPECT_FALSE(harness.engine->HasWork());
}

TEST(EngineTest, EndsAtMaxModelLen) {
  EngineHarness harness(Options());
  harness.Add(1, 31);
  EXPECT_THAT(RunToEnd(harness, 1), SizeIs(1));
  harness.Add(2, 30);
  EXPECT_THAT(RunToEnd(harness, 2), SizeIs(2));
}

TEST(EngineTest, EosAndStopTokensArePartOfTheOutput) {
  EngineHarness harness(Options());
  EngineRequest request = EngineHarness::Request(1, 3);
  request.stop_token_ids = {1};
  harness.Add(request);
  std::vector<TokenEvent> events = RunToEnd(harness, 1);
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].token_id, 1);
  EXPECT_EQ(events[0].finish, FinishReason::kStopToken);

  request = EngineHarness::Request(2, 3);
  request.eos_token_ids = {7, 1};
  request.max_tokens = 1;  // the end that the model chose is the one to tell
  harness.Add(request);
  events = RunToEnd(harness, 2);
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].token_id, 1);
  EXPECT_EQ(events[0].finish, FinishReason::kEos);
}

TEST(EngineTest, IgnoreEosIgnoresEosButNotStopTokens) {
  EngineHarness harness(Options());
  EngineRequest request = EngineHarness::Request(1, 3);
  request.eos_token_ids = {1};
  request.ignore_eos = true;
  request.max_tokens = 4;
  harness.Add(request);
  std::vector<TokenEvent> events = RunToEnd(harness, 1);
  EXPECT_THAT(events, SizeIs(4));
  EXPECT_EQ(events.back().finish, FinishReason::kLength);

  request.id = RequestId{2};
  request.stop_token_ids = {1};
  harness.Add(request);
  events = RunToEnd(harness, 2);
  EXPECT_THAT(events, SizeIs(1));
  EXPECT_EQ(events.back().finish, FinishReason::kStopToken);
}

TEST(EngineTest, AResultThatIsNotANumberEndsItsRequestAlone) {
  EngineHarness harness(Options());
  harness.Add(1, 3);
  harness.Add(2, 3);
  harness.Step();
  const std::vector<std::int32_t> tokens = {-1, 5};
  harness.engine->Step(kStart, StepResult{.step = 1, .token_ids = tokens});
  const std::vector<TokenEvent> events = harness.Events();
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_EQ(events[0].id, RequestId{1});
  EXPECT_EQ(events[0].finish, FinishReason::kError);
  EXPECT_FALSE(events[0].token_id.has_value());
  EXPECT_EQ(events[0].error.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(std::string(events[0].error.message()), "the model's output was not a number");
  EXPECT_EQ(events[1].finish, FinishReason::kNone);
  EXPECT_EQ(events[1].token_id, 5);
  EXPECT_EQ(harness.engine->Stats().num_running, 1);
}

TEST(EngineTest, ResumedTokensCountAsOutputAndAreRecomputed) {
  EngineHarness harness(Options());
  EngineRequest request = EngineHarness::Request(1, 2);
  request.resume_token_ids = {8, 9};
  request.max_tokens = 4;
  harness.Add(request);
  harness.Step();
  EXPECT_THAT(harness.plan->token_ids, testing::ElementsAre(1, 3, 8, 9));
  EXPECT_EQ(harness.plan->num_sampled_rows(), 1);
  EXPECT_THAT(RunToEnd(harness, 1), SizeIs(2));
}

TEST(EngineTest, ResumedTokensThatEndTheRequestEndItAtOnce) {
  struct Case {
    std::vector<std::int32_t> resumed;
    FinishReason finish;
  };
  for (const Case& c : {Case{{5, 6, 7}, FinishReason::kLength}, Case{{5, 20}, FinishReason::kEos},
                        Case{{21}, FinishReason::kStopToken}}) {
    EngineHarness harness(Options());
    EngineRequest request = EngineHarness::Request(1, 2);
    request.resume_token_ids = c.resumed;
    request.max_tokens = 3;
    request.eos_token_ids = {20};
    request.stop_token_ids = {21};
    harness.Add(request);
    EXPECT_TRUE(harness.engine->HasWork());  // someone should take the news
    const std::vector<TokenEvent> events = harness.Events();
    ASSERT_THAT(events, SizeIs(1));
    EXPECT_EQ(events[0].finish, c.finish);
    EXPECT_FALSE(events[0].token_id.has_value());
    EXPECT_FALSE(harness.engine->HasWork());
    EXPECT_THAT(harness.Step(), IsEmpty());
  }
}

TEST(EngineTest, CancelEndsARunningRequestAndFreesItsBlocksAtTheNextStep) {
  for (bool async : {false, true}) {
    EngineOptions options = Options();
    options.async_scheduling = async;
    EngineHarness harness(options);
    harness.Add(1, 9);
    harness.Step();
    if (async) harness.StepAhead();
    harness.Cancel(1);
    harness.Cancel(1);
    EXPECT_THAT(harness.StepAhead(), IsEmpty());  // before the results of what is in flight
    EXPECT_EQ(harness.LastEvent(1).finish, FinishReason::kAborted);
    EXPECT_EQ(harness.engine->Stats().num_free_blocks, 8);
    EXPECT_EQ(harness.engine->Stats().kv_tokens, 0);
    while (!harness.in_flight.empty()) EXPECT_THAT(harness.Step(), IsEmpty());
    EXPECT_THAT(harness.Events(), IsEmpty());
  }
}

TEST(EngineTest, CancelEndsAQueuedRequestAndUnknownIdsAreIgnored) {
  EngineHarness harness(Options());
  harness.Add(1, 9);
  harness.Cancel(1);
  harness.Cancel(77);
  EXPECT_THAT(harness.Step(), IsEmpty());
  EXPECT_EQ(harness.LastEvent(1).finish, FinishReason::kAborted);
  EXPECT_EQ(harness.engine->Stats().num_waiting, 0);
  EXPECT_FALSE(harness.engine->HasWork());
}

TEST(EngineTest, DeadlinesEndWaitingAndRunningRequests) {
  EngineOptions options = Options();
  options.max_num_seqs = 1;
  EngineHarness harness(options);
  for (std::uint64_t id : {1, 2, 3}) {
    EngineRequest request = EngineHarness::Request(id, 3);
    request.deadline = kStart + absl::Seconds(10 * id);
    harness.Add(request);
  }
  EXPECT_EQ(harness.engine->NextDeadline(), kStart + absl::Seconds(10));
  EXPECT_TRUE(harness.Step(kStart + absl::Seconds(10) - absl::Nanoseconds(1)).contains(1));
  harness.Step(kStart + absl::Seconds(20));
  std::vector<TokenEvent> events = harness.Events();
  ASSERT_THAT(events, SizeIs(3));  // the token of 1, then two ends
  EXPECT_EQ(events[1].id, RequestId{1});
  EXPECT_EQ(events[1].finish, FinishReason::kDeadline);
  EXPECT_EQ(events[2].id, RequestId{2});
  EXPECT_EQ(events[2].finish, FinishReason::kDeadline);
  EXPECT_EQ(harness.engine->NextDeadline(), kStart + absl::Seconds(30));
}

TEST(EngineTest, RefusesBadRequestsAndSaysWhatIsAllowed) {
  EngineHarness harness(Options());
  struct Case {
    void (*spoil)(EngineRequest&);
    const char* says;
  };
  const Case cases[] = {
      {[](EngineRequest& r) { r.prompt_token_ids.clear(); }, "prompt is empty"},
      {[](EngineRequest& r) { r.prompt_token_ids[1] = 100; },
       "prompt_token_ids[1] is 100; allowed is 0 to 99"},
      {[](EngineRequest& r) { r.prompt_token_ids[0] = -1; }, "prompt_token_ids[0] is -1"},
      {[](EngineRequest& r) {
         r.resume_token_ids = {1, 100};
       },
       "resume_token_ids[1] is 100"},
      {[](EngineRequest& r) { r.prompt_token_ids.assign(32, 1); },
       "the prompt has 32 tokens; max_model_len 32 allows 31"},
      {[](EngineRequest& r) { r.max_tokens = 0; }, "max_tokens is 0"},
      {[](EngineRequest& r) {
         r.stop_token_ids = {1, -7};
       },
       "stop_token_ids[1] is -7"},
      {[](EngineRequest& r) { r.sampling.min_p = 1.5F; }, "min_p is 1.5"},
      {[](EngineRequest& r) {
         r.max_tokens = 3;
         r.logits = std::make_shared<LogitsParams>(LogitsParams{.min_tokens = 4});
       },
       "min_tokens is 4; max_tokens 3 allows 0 to 3"},
      {[](EngineRequest& r) { r.sampling.temperature = -1; }, "temperature is -1"},
      {[](EngineRequest& r) { r.sampling.top_p = 0; }, "top_p is 0"},
      {[](EngineRequest& r) { r.sampling.top_k = -2; }, "top_k is -2"},
  };
  for (const Case& c : cases) {
    EngineRequest request = EngineHarness::Request(1, 3);
    c.spoil(request);
    const absl::Status status = CheckRequest(request, harness.engine->options());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
  EngineRequest edge = EngineHarness::Request(1, 31);
  edge.prompt_token_ids = std::vector<std::int32_t>(31, 99);
  edge.max_tokens = std::numeric_limits<std::int32_t>::max();
  edge.logits = std::make_shared<LogitsParams>(LogitsParams{.min_tokens = edge.max_tokens});
  EXPECT_TRUE(CheckRequest(edge, harness.engine->options()).ok());
  EXPECT_TRUE(harness.engine->Add(edge, kStart).ok());
}

TEST(EngineTest, RefusesAnIdInUseUntilItsRequestEnds) {
  EngineHarness harness(Options());
  harness.Add(1, 3);
  EXPECT_EQ(harness.engine->Add(EngineHarness::Request(1, 3), kStart).code(),
            absl::StatusCode::kAlreadyExists);
  harness.Cancel(1);
  harness.Step();
  EXPECT_TRUE(harness.engine->Add(EngineHarness::Request(1, 3), kStart).ok());
}

TEST(EngineTest, ATokenOfAnEarlierOwnerOfAnIdIsDropped) {
  EngineHarness harness(Options());
  harness.Add(1, 3);
  harness.Step();
  harness.Cancel(1);
  harness.StepAhead();
  harness.Add(1, 3);
  harness.Events();
  harness.Step();
  EXPECT_THAT(harness.Events(), IsEmpty());
}

TEST(EngineTest, RefusesMoreThanCanRunAndWait) {
  EngineHarness harness(Options());
  const auto refused = [&] {
    const absl::Status status = harness.engine->Add(EngineHarness::Request(9, 3), kStart);
    return status.code() == absl::StatusCode::kResourceExhausted &&
           status.message() == "8 requests run or wait; max_num_seqs is 4, max_num_waiting 4";
  };
  // At once, before any of them runs, as well as later.
  for (std::uint64_t id = 1; id <= 8; ++id) harness.Add(id, 3);
  EXPECT_TRUE(refused());
  harness.Step();
  EXPECT_TRUE(refused());
  harness.Cancel(3);
  harness.Step();
  EXPECT_TRUE(harness.engine->Add(EngineHarness::Request(9, 3), kStart).ok());
}

TEST(EngineTest, RefusesOptionsThatCannotServe) {
  const auto refused = [](void (*spoil)(EngineOptions&)) {
    EngineOptions options = Options();
    spoil(options);
    const absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(options);
    EXPECT_EQ(engine.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(engine.status().message());
  };
  EXPECT_EQ(refused([](EngineOptions& o) { o.max_model_len = 33; }),
            "max_model_len is 33; 8 blocks of 4 tokens hold one sequence of at most 32");
  EXPECT_THAT(refused([](EngineOptions& o) { o.num_blocks = 0; }), HasSubstr("num_blocks is 0"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.max_num_seqs = 0; }), HasSubstr("max_num_seqs"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.vocab_size = 0; }), HasSubstr("vocab_size"));
  EXPECT_TRUE(Engine::Create(Options()).ok());
}

TEST(EngineTest, StatsCountWhatHappened) {
  EngineHarness harness(Options());
  EngineRequest request = EngineHarness::Request(1, 5);
  request.max_tokens = 3;
  harness.Add(request);
  EXPECT_EQ(harness.engine->Stats().num_waiting, 1);
  harness.Step();
  harness.Step();
  EngineStats stats = harness.engine->Stats();
  EXPECT_EQ(stats.num_running, 1);
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.num_blocks, 8);
  EXPECT_EQ(stats.num_free_blocks, 6);
  EXPECT_EQ(stats.kv_tokens, 6);
  RunToEnd(harness, 1);
  stats = harness.engine->Stats();
  EXPECT_EQ(stats.prompt_tokens, 5u);
  EXPECT_EQ(stats.generation_tokens, 3u);
  EXPECT_EQ(stats.steps, 3u);
  EXPECT_EQ(stats.num_free_blocks, 8);
}

}  // namespace
}  // namespace weft
