#include "server/group_flags.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/router_flags.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(GroupFlagsTest, ARestartBackoffThatShrinksIsRefused) {
  GroupFlags flags;
  flags.model = "model";
  flags.max_restart_backoff = flags.min_restart_backoff;
  EXPECT_EQ(flags.Check(), absl::OkStatus());
  flags.max_restart_backoff -= absl::Nanoseconds(1);
  EXPECT_THAT(flags.Check().ToString(), HasSubstr("--max-restart-backoff is 199.999999ms"));
}

// As in `weft serve`.
TEST(GroupFlagsTest, ALimitThatRoutersAndWorkersHaveIsPassedToBoth) {
  GroupFlags group;
  RouterFlags router;
  OptionParser parser("serve", "");
  group.AddTo(parser);
  router.AddTo(parser);
  const char* arguments[] = {"serve", "--max-logprobs=50", "--block-size=64", "--max-n=3"};
  ASSERT_EQ(parser.Parse(static_cast<int>(std::size(arguments)), arguments), std::nullopt);
  EXPECT_THAT(GroupFlags::Arguments(parser),
              UnorderedElementsAre("--block-size=64", "--max-logprobs=50"));
  EXPECT_THAT(RouterFlags::Arguments(parser),
              UnorderedElementsAre("--max-n=3", "--max-logprobs=50"));
}

TEST(WorkerLimitsTest, AreOptionsOfAWorker) {
  WorkerLimits limits;
  OptionParser parser("worker", "");
  limits.AddTo(parser);
  const char* arguments[] = {"worker",
                             "--max-logprobs=-1",
                             "--max-stop-token-ids=1",
                             "--max-logit-bias=2",
                             "--max-allowed-token-ids=3",
                             "--max-bad-word-sequences=4",
                             "--max-bad-word-sequence-tokens=5",
                             "--max-stream-buffer-bytes=2MiB"};
  ASSERT_EQ(parser.Parse(static_cast<int>(std::size(arguments)), arguments), std::nullopt);
  EXPECT_EQ(limits.max_logprobs, -1);
  EXPECT_EQ(limits.max_stop_token_ids, 1);
  EXPECT_EQ(limits.max_logit_bias, 2);
  EXPECT_EQ(limits.max_allowed_token_ids, 3);
  EXPECT_EQ(limits.max_bad_word_sequences, 4);
  EXPECT_EQ(limits.max_bad_word_sequence_tokens, 5);
  EXPECT_EQ(limits.max_stream_buffer_bytes, 2 << 20);
}

}  // namespace
}  // namespace weft
