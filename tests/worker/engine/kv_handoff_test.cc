// What the engine does with requests whose prompt is computed by another group.
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/engine_harness.h"

namespace weft {
namespace {

constexpr std::uint64_t kTransfer = 7;

EngineOptions Options() {
  return {.block_size = 4,
          .num_blocks = 8,
          .max_model_len = 32,
          .max_num_seqs = 2,
          .max_num_batched_tokens = 8,
          .num_ranks = 2,
          .kv_lease = absl::Seconds(10)};
}

EngineRequest Receives(std::uint64_t id, std::int64_t prompt_tokens) {
  EngineRequest request = EngineHarness::Request(id, prompt_tokens);
  request.kv_transfer = kTransfer;
  return request;
}
EngineRequest Sends(std::uint64_t id, std::int64_t prompt_tokens) {
  EngineRequest request = Receives(id, prompt_tokens);
  request.kv_target = std::make_shared<const std::string>("there");
  return request;
}

class KvHandoffTest : public testing::Test {
 protected:
  void Report(KvReport::Kind kind, std::string error = "") {
    engine().OnKvReport({.transfer = kTransfer, .kind = kind, .error = std::move(error)});
  }
  void ReportAll(KvReport::Kind kind) {
    Report(kind);
    Report(kind);
  }
  Engine& engine() { return *harness_.engine; }
  // The kinds of the last plan's operations.
  std::vector<KvOp::Kind> Ops() const {
    std::vector<KvOp::Kind> kinds;
    if (!harness_.plan.has_value()) return kinds;
    for (const KvOp& op : harness_.plan->kv_ops) kinds.push_back(op.kind);
    return kinds;
  }
  // Every block is back once the request has ended.
  void ExpectNothingHeld() {
    EXPECT_EQ(engine().Stats().num_free_blocks, 8);
    EXPECT_EQ(engine().Stats().num_running, 0);
  }

  EngineHarness harness_{Options()};
};

TEST_F(KvHandoffTest, ReceivesThenDecodesFromTheFirstToken) {
  harness_.Add(Receives(1, 10));
  EXPECT_TRUE(harness_.Step().empty());  // a plan without rows
  ASSERT_EQ(Ops(), std::vector{KvOp::Kind::kReceive});
  const KvOp op = harness_.plan->kv_ops[0];
  EXPECT_EQ(op.first_position, 0);
  EXPECT_EQ(op.end_position, 10);
  EXPECT_EQ(harness_.plan->delta_blocks.size(), 3u);
  harness_.Step();
  EXPECT_FALSE(engine().HasWork());
  Report(KvReport::Kind::kOpened);
  EXPECT_TRUE(harness_.Events().empty()) << "one rank is not ready";
  Report(KvReport::Kind::kOpened);
  const TokenEvent event = harness_.LastEvent(1);
  ASSERT_TRUE(event.kv_reserved.has_value());
  EXPECT_EQ(event.kv_reserved->transfer, kTransfer);
  EXPECT_TRUE(harness_.Step().empty());
  ReportAll(KvReport::Kind::kDone);
  EXPECT_TRUE(harness_.Step().empty()) << "without the first token";
  engine().ContinueKv(RequestId{1}, 5, "");
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 1}}));
  EXPECT_EQ(Ops(), std::vector{KvOp::Kind::kClose});
  EXPECT_EQ(harness_.plan->sequences[0].first_position, 10);
  EXPECT_EQ(harness_.plan->token_ids, std::vector<std::int32_t>{5});
  harness_.Step();
  EXPECT_EQ(harness_.LastEvent(1).output_index, 1);
}

TEST_F(KvHandoffTest, TheFirstTokenMayComeBeforeTheKv) {
  harness_.Add(Receives(1, 10));
  harness_.Step();
  harness_.Step();
  ReportAll(KvReport::Kind::kOpened);
  engine().ContinueKv(RequestId{1}, 5, "");
  Report(KvReport::Kind::kDone);
  EXPECT_TRUE(harness_.Step().empty());
  Report(KvReport::Kind::kDone);
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 1}}));
}

TEST_F(KvHandoffTest, ComputesThePromptWhenTheTransferFails) {
  for (const bool has_token : {false, true}) {
    SCOPED_TRACE(has_token);
    const std::uint64_t id = has_token ? 2 : 1;
    harness_.Add(Receives(id, 8));  // full blocks: the token after it needs another one
    harness_.Step();
    harness_.Step();
    ReportAll(KvReport::Kind::kOpened);
    if (has_token) engine().ContinueKv(RequestId{id}, 5, "");
    Report(KvReport::Kind::kDone);
    Report(KvReport::Kind::kFailed, "a rank is gone");
    EXPECT_EQ(harness_.LastEvent(id).kv_failure, "a rank is gone");
    EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{id, 8}}));
    EXPECT_EQ(Ops(), std::vector{KvOp::Kind::kClose});
    EXPECT_EQ(harness_.plan->sequences[0].first_position, 0);
    harness_.Step();
    if (has_token) harness_.Step();  // its ninth token
    EXPECT_EQ(harness_.LastEvent(id).output_index, has_token ? 1 : 0);
    harness_.Cancel(id);
    while (!harness_.in_flight.empty()) harness_.Step();
    ExpectNothingHeld();
  }
}

TEST_F(KvHandoffTest, ComputesThePromptWhenTheRouterSaysSo) {
  harness_.Add(Receives(1, 8));
  engine().ContinueKv(RequestId{1}, std::nullopt, "short");
  EXPECT_EQ(harness_.LastEvent(1).kv_failure, "short");
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 8}}));
  EXPECT_TRUE(Ops().empty()) << "the ranks never knew of it";
}

TEST_F(KvHandoffTest, ATransferWithoutProgressEndsWithItsLease) {
  harness_.Add(Receives(1, 8));
  harness_.Step(kStart);
  harness_.Step(kStart);
  ReportAll(KvReport::Kind::kOpened);
  harness_.Step(kStart + absl::Seconds(5));  // renews
  EXPECT_EQ(engine().NextDeadline(), kStart + absl::Seconds(15));
  EXPECT_TRUE(harness_.Step(kStart + absl::Seconds(14.9)).empty());
  EXPECT_EQ(harness_.Step(kStart + absl::Seconds(15)), (EngineHarness::Rows{{1, 8}}));
  EXPECT_EQ(harness_.LastEvent(1).kv_failure, "no progress for 10s");
  Report(KvReport::Kind::kDone);  // too late, and out of order: nothing
  Report(KvReport::Kind::kFailed, "late");
}

TEST_F(KvHandoffTest, SendsChunksAndHoldsItsBlocksUntilTheyWereTaken) {
  EngineRequest request = Sends(1, 10);
  request.kv_first_position = 4;
  harness_.Add(std::move(request));
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 8}}));
  ASSERT_EQ(Ops(), (std::vector{KvOp::Kind::kSend, KvOp::Kind::kSendRows}));
  EXPECT_EQ(harness_.plan->kv_ops[0].first_position, 4);
  EXPECT_EQ(*harness_.plan->kv_ops[0].target, "there");
  EXPECT_FALSE(harness_.plan->kv_ops[1].last);
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 2}}));
  ASSERT_EQ(Ops(), std::vector{KvOp::Kind::kSendRows});
  EXPECT_TRUE(harness_.plan->kv_ops[0].last);
  EXPECT_EQ(harness_.plan->kv_ops[0].end_position, 10);
  EXPECT_TRUE(harness_.Step().empty());
  const TokenEvent token = harness_.LastEvent(1);
  EXPECT_TRUE(token.token_id.has_value());
  EXPECT_EQ(token.finish, FinishReason::kNone);
  EXPECT_FALSE(engine().HasWork());
  EXPECT_EQ(engine().Stats().num_free_blocks, 8 - 3);
  Report(KvReport::Kind::kDone);
  EXPECT_TRUE(harness_.Events().empty());
  Report(KvReport::Kind::kDone);
  EXPECT_EQ(harness_.LastEvent(1).finish, FinishReason::kHandedOff);
  harness_.Step();
  EXPECT_EQ(Ops(), std::vector{KvOp::Kind::kClose});
  ExpectNothingHeld();
}

TEST_F(KvHandoffTest, ARequestThatEndsWithItsFirstTokenIsNotHandedOn) {
  EngineRequest request = Sends(1, 6);
  request.eos_token_ids = {1};
  harness_.Add(std::move(request));
  harness_.Step();
  harness_.Step();
  EXPECT_EQ(harness_.LastEvent(1).finish, FinishReason::kEos);
  ExpectNothingHeld();
  EngineRequest one = Sends(2, 6);
  one.max_tokens = 1;
  harness_.Add(std::move(one));
  harness_.Step();
  harness_.Step();
  EXPECT_EQ(harness_.LastEvent(2).finish, FinishReason::kLength);
  ExpectNothingHeld();
}

// How long a sequence may get is for the group to say where it goes on.
TEST_F(KvHandoffTest, APromptThatFillsThePrefillGroupIsHandedOn) {
  EngineRequest request = Sends(1, 31);  // max_model_len is 32
  request.max_tokens = 5;
  harness_.Add(std::move(request));
  for (int i = 0; i < 5; ++i) harness_.Step();
  const TokenEvent token = harness_.LastEvent(1);
  EXPECT_TRUE(token.token_id.has_value());
  EXPECT_EQ(token.finish, FinishReason::kNone);
  ReportAll(KvReport::Kind::kDone);
  EXPECT_EQ(harness_.LastEvent(1).finish, FinishReason::kHandedOff);
  ExpectNothingHeld();
}

TEST_F(KvHandoffTest, AFailedSendEndsTheRequest) {
  harness_.Add(Sends(1, 6));
  harness_.Step();
  harness_.Step();
  Report(KvReport::Kind::kFailed, "a peer is gone");
  const TokenEvent event = harness_.LastEvent(1);
  EXPECT_EQ(event.finish, FinishReason::kError);
  EXPECT_EQ(event.error.message(), "the KV was not handed over: a peer is gone");
  ExpectNothingHeld();
}

TEST_F(KvHandoffTest, ACancelledTransferIsForgottenBeforeItsBlocksAreAnyones) {
  for (const bool sends : {false, true}) {
    const std::uint64_t id = sends ? 2 : 1;
    harness_.Add(sends ? Sends(id, 20) : Receives(id, 20));
    harness_.Step();
    harness_.Cancel(id);
    harness_.Add(id + 10, 20);  // wants blocks of it
    EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{id + 10, 8}}));
    EXPECT_EQ(Ops(), std::vector{KvOp::Kind::kClose}) << "in the same plan as the first reuse";
    harness_.Cancel(id + 10);
    while (!harness_.in_flight.empty()) harness_.Step();
    ExpectNothingHeld();
  }
}

// Two groups that receive from each other hold the blocks that the other's prompt needs.
TEST_F(KvHandoffTest, WhoCannotSendBecauseAllOthersReceiveFailsAtOnce) {
  harness_.Add(Receives(1, 20));  // 6 of 8 blocks
  harness_.Step();
  EngineRequest request = Sends(2, 10);
  request.kv_transfer = kTransfer + 1;
  harness_.Add(std::move(request));
  harness_.Add(3, 10);  // may wait: its client is of this group
  harness_.Step();
  const TokenEvent event = harness_.LastEvent(2);
  EXPECT_EQ(event.finish, FinishReason::kError);
  EXPECT_EQ(event.error.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine().Stats().num_waiting, 1);
  engine().ContinueKv(RequestId{1}, std::nullopt, "as the other group does");
  EXPECT_EQ(harness_.Step(), (EngineHarness::Rows{{1, 8}}));
}

TEST_F(KvHandoffTest, WhoCannotSendYetWaitsForWhatComputes) {
  harness_.Add(2, 4);
  harness_.Step();
  harness_.Add(Receives(1, 16));
  harness_.Step();
  EngineRequest request = Sends(3, 10);
  request.kv_transfer = kTransfer + 1;
  harness_.Add(std::move(request));
  for (int i = 0; i < 3; ++i) harness_.Step();
  EXPECT_EQ(engine().Stats().num_waiting, 1);
}

// A decode that needs a block takes none of a transfer's.
TEST_F(KvHandoffTest, IsNotPreempted) {
  harness_.Add(Receives(1, 20));  // 6 blocks with the token after it
  harness_.Step();
  harness_.Step();
  harness_.Add(2, 4);  // at most 2 blocks for it
  for (int i = 0; i < 12; ++i) harness_.Step();
  EXPECT_GT(engine().Stats().num_preemptions, 0u);
  ReportAll(KvReport::Kind::kDone);
  engine().ContinueKv(RequestId{1}, 5, "");
  const EngineHarness::Rows rows = harness_.Step();
  EXPECT_EQ(rows.at(1), 1) << "its KV is there";
}

}  // namespace
}  // namespace weft
