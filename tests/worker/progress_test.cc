#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/rank.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

// Returns once the clock has moved on.
absl::Time AfterNow() {
  const absl::Time start = absl::Now();
  absl::Time now = start;
  while (now <= start) now = absl::Now();
  return now;
}

TEST(ProgressTest, OneThatIsIdleIsAlive) {
  Progress progress;
  AfterNow();
  EXPECT_TRUE(progress.CheckLiveness(absl::ZeroDuration()).ok());
  progress.BeginStep();
  progress.EndStep();
  AfterNow();
  EXPECT_TRUE(progress.CheckLiveness(absl::ZeroDuration()).ok());
  EXPECT_EQ(progress.steps(), 1U);
}

TEST(ProgressTest, OnlyTimeInStepsCounts) {
  Progress progress;
  const absl::Time start = absl::Now();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(progress.step_time(), absl::ZeroDuration());
  progress.BeginStep();
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(progress.step_time(), absl::ZeroDuration());
  progress.EndStep();
  const absl::Duration one = progress.step_time();
  EXPECT_GE(one, absl::Milliseconds(5));
  EXPECT_LE(one, absl::Now() - start - absl::Milliseconds(19));
  progress.BeginStep();
  progress.EndStep();
  EXPECT_GE(progress.step_time(), one);
}

TEST(ProgressTest, AStepThatDoesNotGetOnIsNamed) {
  Progress progress;
  progress.BeginStep();
  AfterNow();
  EXPECT_TRUE(progress.CheckLiveness(absl::Hours(1)).ok());
  const absl::Status stuck = progress.CheckLiveness(absl::ZeroDuration());
  EXPECT_EQ(stuck.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(stuck.message()), HasSubstr("step 1 has made no progress for"));
}

TEST(ProgressTest, LayersAndOtherSignsOfLifeInAStepCount) {
  Progress progress;
  progress.BeginStep();
  progress.Observe(0);
  absl::Time before = AfterNow();
  progress.Observe(0);
  EXPECT_LT(progress.last_progress(), before) << "nothing has happened";
  ++progress.ticks();
  progress.Observe(0);
  EXPECT_GE(progress.last_progress(), before);
  before = AfterNow();
  progress.Observe(1);
  EXPECT_GE(progress.last_progress(), before);
}

}  // namespace
}  // namespace weft
