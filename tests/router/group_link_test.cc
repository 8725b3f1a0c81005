#include "router/group_link.h"

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using std::chrono::milliseconds;

// A leader whose state stream the test plays. Calls are not made here.
class FakeLeader final : public LeaderClient {
 public:
  class IdleStream final : public Stream {
   public:
    void Start() override {}
    void Cancel() override {}
  };

  std::shared_ptr<Stream> WatchState(WatchHandler& handler, bool /*block_changes*/) override {
    handler_ = &handler;
    return std::make_shared<IdleStream>();
  }
  std::shared_ptr<Stream> Generate(const v1::WorkerGenerateRequest& /*request*/,
                                   std::chrono::system_clock::time_point /*deadline*/,
                                   GenerateHandler& /*handler*/) override {
    return std::make_shared<IdleStream>();
  }
  void ContinueKv(v1::ContinueKvRequest /*request*/) override {}

  void SayReady() {
    v1::GroupState state;
    state.mutable_group()->set_ready(true);
    state.mutable_group()->set_state("ready");
    handler_->OnState(state);
  }
  void EndWatch() { handler_->OnWatchEnd(absl::UnavailableError("Connection reset by peer")); }

 private:
  WatchHandler* handler_ = nullptr;
};

class GroupLinkTest : public ::testing::Test {
 protected:
  GroupLinkTest() { link_.Tick(now_); }
  ~GroupLinkTest() override {
    leader_->EndWatch();
    link_.Shutdown();
  }

  bool ready() const { return link_.Snapshot()->ready; }
  std::string state() const { return link_.Snapshot()->state; }
  void ReportNotReady() { link_.ReportNotReady(link_.Snapshot()->epoch); }

  FakeLeader* leader_ = nullptr;
  GroupLink::Clock::time_point now_{std::chrono::hours(1)};
  GroupLink link_{"leader",
                  {.min_backoff = milliseconds(100),
                   .connect =
                       [this](const std::string& /*address*/) {
                         auto leader = std::make_unique<FakeLeader>();
                         leader_ = leader.get();
                         return leader;
                       },
                   .now = [this] { return now_; }},
                  [] {},
                  [] {}};
};

TEST_F(GroupLinkTest, StatesFromBeforeALossDoNotCallTheGroupReady) {
  leader_->SayReady();
  ASSERT_TRUE(ready());
  ReportNotReady();
  EXPECT_FALSE(ready());
  leader_->SayReady();
  EXPECT_FALSE(ready());
  now_ += milliseconds(50);
  ReportNotReady();  // another call of the same incarnation
  now_ += milliseconds(99);
  leader_->SayReady();
  EXPECT_FALSE(ready());
  EXPECT_NE(state(), "ready");
  now_ += milliseconds(1);
  leader_->SayReady();
  EXPECT_TRUE(ready());
  EXPECT_EQ(state(), "ready");
}

TEST_F(GroupLinkTest, TheNextIncarnationIsReadyAsSoonAsItSaysSo) {
  leader_->SayReady();
  const std::uint64_t first = link_.Snapshot()->epoch;
  ReportNotReady();
  leader_->EndWatch();
  now_ += milliseconds(100);
  link_.Tick(now_);
  link_.ReportNotReady(first);  // a call of the old one, found dead late
  leader_->SayReady();
  EXPECT_TRUE(ready());
}

}  // namespace
}  // namespace weft
