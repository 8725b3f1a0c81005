#include "router/status_page.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RouterStatus Status() {
  RouterStatus status;
  status.version = "1.2.3";
  status.model = "tiny";
  status.now = absl::UnixEpoch() + absl::Hours(1);
  status.uptime = absl::Seconds(75);
  return status;
}

std::shared_ptr<GroupSnapshot> Group() {
  auto group = std::make_shared<GroupSnapshot>();
  group->ready = true;
  group->state = "ready";
  v1::GroupInfo& info = group->info;
  info.set_address("10.0.0.1:50052");
  info.set_tensor_parallel_size(2);
  info.set_num_blocks(80);
  info.set_num_free_blocks(60);
  info.set_num_requests_running(7);
  info.set_num_requests_waiting(3);
  for (int i = 0; i < 2; ++i) {
    v1::RankInfo& rank = *info.add_ranks();
    rank.set_rank(i);
    rank.set_kv_bytes(3 << 20);
  }
  return group;
}

TEST(StatusPageTest, ShowsGroupsTheirLoadAndABarForEachRank) {
  RouterStatus status = Status();
  status.cluster.groups = {Group()};
  status.requests_in_flight = 11;
  const std::string page = StatusPage(status);
  for (const char* text :
       {"1 of 1 groups ready", "<b>11</b> requests in flight", "10.0.0.1:50052", "<b>7</b> running",
        "<b>3</b> waiting", "20 of 80 blocks in use", "up 1m15s", "3.0 MiB"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  std::size_t bars = 0;
  for (std::size_t at = 0; (at = page.find("width:25.0%", at)) != std::string::npos; ++at) ++bars;
  EXPECT_EQ(bars, 2U);
}

TEST(StatusPageTest, AGroupThatWasNeverHeardOfIsShownAsDown) {
  RouterStatus status = Status();
  auto group = std::make_shared<GroupSnapshot>();
  group->state = "unreachable: connection refused";
  group->info.set_address("nobody:1");
  status.cluster.groups = {group};
  const std::string page = StatusPage(status);
  EXPECT_THAT(page, HasSubstr("<span class=\"state down\">unreachable: connection refused</span>"));
  EXPECT_THAT(page, Not(HasSubstr("running")));
}

TEST(StatusPageTest, TextOfOthersIsEscaped) {
  RouterStatus status = Status();
  const std::string evil = "<script>alert(\"1\")</script>&'";
  auto group = Group();
  group->state = evil;
  group->info.set_model(evil);
  group->info.set_address(evil);
  group->info.mutable_ranks(0)->set_metrics_address(evil);
  status.cluster.groups = {group};
  status.model = evil;
  status.errors = {{status.now - absl::Seconds(9), "UNAVAILABLE", evil, evil}};
  const std::string page = StatusPage(status);
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;"));
  EXPECT_THAT(page, HasSubstr("<td class=n>9 s</td><td>UNAVAILABLE</td>"));
}

TEST(RecentErrorsTest, KeepsTheNewestAndCutsLongMessages) {
  RecentErrors errors;
  for (int i = 0; i < 50; ++i) errors.Add(absl::InternalError(absl::StrCat("error ", i)));
  errors.Add(absl::InternalError(std::string(10'000, 'x')));
  const auto all = errors.All();
  ASSERT_EQ(all.size(), RecentErrors::kMaxEntries);
  std::string wide;
  for (int i = 0; i < 200; ++i) wide += "\xe2\x82\xac";
  errors.Add(absl::InternalError("x" + wide));
  EXPECT_EQ(errors.All()[0].message, "x" + wide.substr(0, 297));
  EXPECT_EQ(all[0].message.size(), RecentErrors::kMaxMessageBytes);
  EXPECT_EQ(all[1].message, "error 49");
  EXPECT_EQ(all[1].code, "INTERNAL");
}

}  // namespace
}  // namespace weft
