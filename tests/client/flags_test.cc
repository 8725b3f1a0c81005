#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/group_flags.h"
#include "server/options.h"
#include "server/router_flags.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

struct Parsed {
  std::optional<int> exit_code;
  std::string out;
  std::vector<std::string> arguments;  // for a child
};

// Parses with `Flags` alone in the table.
template <typename Flags>
Parsed Parse(const std::vector<std::string>& arguments, Flags& flags) {
  std::vector<const char*> argv = {"program"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  OptionParser parser("program", "test");
  flags.AddTo(parser);
  std::ostringstream out;
  std::ostringstream err;
  Parsed parsed;
  parsed.exit_code = parser.Parse(static_cast<int>(argv.size()), argv.data(), out, err);
  parsed.out = out.str() + err.str();
  parsed.arguments = Flags::Arguments(parser);
  return parsed;
}

template <typename Flags>
std::size_t NumOptions() {
  Flags flags;
  return nlohmann::json::parse(Parse({"--print-config"}, flags).out).size();
}

const std::vector<std::string> kEveryGroupFlag = {
    "--model=dir",
    "--served-model-name=tiny",
    "--log-level=debug",
    "--dtype=float32",
    "--quantization=int8",
    "--max-model-len=4K",
    "--device=cuda",
    "--enforce-eager=true",
    "--use-nccl-symm-mem=true",
    "--tensor-parallel-size=4",
    "--decode-context-parallel-size=2",
    "--prefill-context-parallel-size=2",
    "--cp-kv-cache-interleave-size=8",
    "--block-size=32",
    "--dcp-comm-backend=a2a",
    "--dcp-replicate-query=true",
    "--enable-expert-parallel=true",
    "--speculative-config={}",
    "--max-num-seqs=3",
    "--max-num-batched-tokens=17",
    "--max-num-waiting=5",
    "--async-scheduling=false",
    "--enable-prefix-caching=false",
    "--kv-cache-dtype=bfloat16",
    "--kv-cache-memory-bytes=1048576",
    "--num-gpu-blocks-override=9",
    "--threads-per-rank=2",
    "--stall-timeout=7s",
    "--min-restart-backoff=300ms",
    "--max-restart-backoff=2s",
    "--log-stats-interval=5s",
    "--force-preemption-every=5",
    "--kv-transfer-config={\"kv_role\":\"kv_both\"}",
    "--kv-transfer-checksum=true",
    "--kv-transfer-bandwidth-limit=1000",
    "--kv-transfer-window-bytes=2000",
    "--kv-transfer-lease=3s",
};

const std::vector<std::string> kEveryRouterFlag = {
    "--host=0.0.0.0",
    "--port=7",
    "--listen=a:1",
    "--api-keys-file=keys.json",
    "--ssl-certfile=cert.pem",
    "--ssl-keyfile=key.pem",
    "--ssl-ca-certs=ca.pem",
    "--skip-tokenizer-init=true",
    "--tokenizer-threads=3",
    "--max-prompt-bytes=1024",
    "--max-prompt-tokens=99",
    "--max-stop-token-ids=5",
    "--max-queued-requests=6",
    "--routing-policy=random",
    "--routing-request-tokens=7",
    "--access-log=false",
    "--dns-refresh-interval=1s",
    "--max-waiting-per-group=2",
    "--retry-budget-ratio=0.5",
    "--retry-budget-min=3",
    "--min-retry-backoff=4ms",
    "--max-retry-backoff=5s",
    "--breaker-failures=6",
    "--breaker-open-time=7s",
    "--slow-start=8s",
    "--first-token-timeout=9s",
    "--max-attempts=4",
    "--max-replays=2",
    "--pd-min-prefill-tokens=5",
    "--max-stream-buffer-bytes=2048",
    "--queue-timeout=1s",
    "--drain-timeout=2s",
    "--max-chat-messages=1",
    "--max-n=2",
    "--max-stop-strings=3",
    "--max-stop-string-bytes=4",
    "--max-bad-words=5",
    "--max-bad-word-tokens=6",
    "--max-logit-bias=7",
    "--max-logprobs=8",
    "--max-detokenize-tokens=9",
    "--max-requests=10",
    "--max-message-bytes=11",
    "--keepalive-interval=12s",
    "--keepalive-timeout=13s",
    "--min-ping-interval=14s",
    "--max-connection-age=15s",
    "--max-connection-age-grace=16s",
    "--max-concurrent-streams=17",
    "--grpc-memory-quota-bytes=18",
    "--heartbeat-timeout=19s",
    "--min-reconnect-backoff=20s",
    "--max-reconnect-backoff=21s",
};

// A flag that AddTo() knows and Arguments() forgets would be accepted by `weft serve` and ignored.
TEST(FlagsTest, EveryFlagReachesTheChild) {
  GroupFlags group;
  ASSERT_EQ(kEveryGroupFlag.size(), NumOptions<GroupFlags>()) << "add the new flag above";
  EXPECT_THAT(Parse(kEveryGroupFlag, group).arguments, UnorderedElementsAreArray(kEveryGroupFlag));
  EXPECT_EQ(group.MaxModelLen(), 4096);
  EXPECT_EQ(group.kv_cache_memory_bytes, 1048576);

  RouterFlags router;
  ASSERT_EQ(kEveryRouterFlag.size(), NumOptions<RouterFlags>()) << "add the new flag above";
  EXPECT_THAT(Parse(kEveryRouterFlag, router).arguments,
              UnorderedElementsAreArray(kEveryRouterFlag));
}

TEST(FlagsTest, WhatNoGroupCanBeIsRefused) {
  const auto check = [](std::vector<std::string> arguments) {
    GroupFlags flags;
    EXPECT_EQ(Parse(arguments, flags).exit_code, std::nullopt);
    return std::string(flags.Check().message());
  };
  EXPECT_EQ(check({"dir"}), "");
  EXPECT_EQ(check({"dir", "-tp", "6", "-dcp", "3"}), "");
  EXPECT_THAT(check({}), HasSubstr("no model"));
  EXPECT_THAT(check({"dir", "-pcp", "2"}), HasSubstr("only 1 is supported"));
  EXPECT_THAT(check({"dir", "-tp", "2", "-dcp", "4"}), HasSubstr("divide"));
  EXPECT_THAT(check({"dir", "--max-model-len=1"}), HasSubstr("--max-model-len is \"1\""));
  EXPECT_THAT(check({"dir", "--stall-timeout=0s"}), HasSubstr("--stall-timeout"));
  EXPECT_THAT(check({"dir", "--kv-transfer-lease=0s"}), HasSubstr("--kv-transfer-lease"));
  EXPECT_THAT(check({"dir", "--kv-transfer-config={}"}), HasSubstr("kv_role is missing"));
}

TEST(FlagsTest, ModelLengthsTakeDecimalAndBinarySuffixes) {
  EXPECT_EQ(*ParseModelLen("auto"), std::nullopt);
  EXPECT_EQ(*ParseModelLen("2"), 2);
  EXPECT_EQ(*ParseModelLen("8k"), 8000);
  EXPECT_EQ(*ParseModelLen("8K"), 8192);
  EXPECT_EQ(*ParseModelLen("1m"), 1000000);
  EXPECT_EQ(*ParseModelLen("1M"), 1048576);
  EXPECT_EQ(*ParseModelLen("2147483647"), 2147483647);
  for (const char* bad : {"", "K", "1", "0", "-5", "1.5K", "8KB", "2048M", "2147483648", "Auto"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseModelLen(bad).status())) << bad;
  }
}

TEST(FlagsTest, TheServedNameIsTheLastPartOfThePath) {
  const auto name = [](std::string model, std::string given = "") {
    CommonFlags flags;
    flags.model = std::move(model);
    flags.served_model_name = std::move(given);
    return flags.ServedModelName();
  };
  EXPECT_EQ(name("models/tiny"), "tiny");
  EXPECT_EQ(name("/models/tiny//"), "tiny");
  EXPECT_EQ(name("tiny"), "tiny");
  EXPECT_EQ(name("models/tiny", "huge"), "huge");
}

}  // namespace
}  // namespace weft
