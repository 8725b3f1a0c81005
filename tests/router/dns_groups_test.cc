// Groups that come and go with the addresses of a name.
#include "router/dns_groups.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/mutex.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using Addresses = std::vector<std::string>;

// What the test says, and nothing for other names.
class Names {
 public:
  void Set(const std::string& host, absl::StatusOr<Addresses> addresses) {
    MutexLock lock(mutex_);
    names_.insert_or_assign(host, std::move(addresses));
  }
  std::unique_ptr<NameResolver> NewResolver() { return std::make_unique<Resolver>(*this); }

 private:
  struct Resolver final : NameResolver {
    explicit Resolver(Names& names) : names(names) {}
    absl::StatusOr<Addresses> Resolve(const std::string& host) override {
      MutexLock lock(names.mutex_);
      const auto found = names.names_.find(host);
      if (found == names.names_.end()) return absl::NotFoundError("no such name");
      return found->second;
    }
    Names& names;
  };
  Mutex mutex_;
  std::map<std::string, absl::StatusOr<Addresses>> names_ ABSL_GUARDED_BY(mutex_);
};

class DnsGroupsTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<DnsGroups>> Start(const Addresses& groups) {
    return DnsGroups::Start(groups, std::chrono::milliseconds(5), names_.NewResolver(),
                            [this](const Addresses& addresses) {
                              MutexLock lock(mutex_);
                              heard_.push_back(addresses);
                            });
  }
  std::vector<Addresses> AwaitHeard(std::size_t count) {
    while (true) {
      {
        MutexLock lock(mutex_);
        if (heard_.size() >= count) return heard_;
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  Names names_;
  Mutex mutex_;
  std::vector<Addresses> heard_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(DnsGroupsTest, ANameStandsForItsAddressesAndOthersForThemselves) {
  names_.Set("weft.svc", Addresses{"10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"});
  const auto dns = Start({"host:7", "dns:///weft.svc:50052", "unix-abstract:x"});
  ASSERT_TRUE(dns.ok()) << dns.status();
  EXPECT_THAT(AwaitHeard(1)[0], ElementsAre("host:7", "10.0.0.1:50052", "10.0.0.2:50052",
                                            "[fd00::1]:50052", "unix-abstract:x"));
}

TEST_F(DnsGroupsTest, ChangesAreHeardOfAndTheOrderOfAnAnswerIsNone) {
  names_.Set("weft", Addresses{"10.0.0.1", "10.0.0.2"});
  const auto dns = Start({"dns:///weft:1"});
  ASSERT_TRUE(dns.ok());
  names_.Set("weft", Addresses{"10.0.0.2", "10.0.0.1"});
  absl::SleepFor(absl::Milliseconds(50));
  names_.Set("weft", Addresses{"10.0.0.3", "10.0.0.2"});
  EXPECT_THAT(AwaitHeard(2), ElementsAre(ElementsAre("10.0.0.1:1", "10.0.0.2:1"),
                                         ElementsAre("10.0.0.2:1", "10.0.0.3:1")));
}

TEST_F(DnsGroupsTest, ANameThatFailsKeepsWhatItHad) {
  names_.Set("weft", Addresses{"10.0.0.1"});
  const auto dns = Start({"dns:///weft:1", "dns:///later:2"});
  ASSERT_TRUE(dns.ok());
  EXPECT_THAT(AwaitHeard(1)[0], ElementsAre("10.0.0.1:1"));
  names_.Set("weft", absl::UnavailableError("no server"));
  absl::SleepFor(absl::Milliseconds(50));
  names_.Set("weft", Addresses{});
  absl::SleepFor(absl::Milliseconds(50));
  names_.Set("later", Addresses{"10.0.0.9"});
  EXPECT_THAT(AwaitHeard(2)[1], ElementsAre("10.0.0.1:1", "10.0.0.9:2"));
}

TEST_F(DnsGroupsTest, WhatIsNoNameWithAPortIsRefused) {
  for (const char* wrong :
       {"dns:///weft", "dns:///:1", "dns:///weft:", "dns:///weft:http", "dns:///weft:123456",
        "dns:///weft:0", "dns:///unix-abstract:x", "weft", "127.0.0.1", ":1", "weft:", "weft:http",
        "weft:0", "weft:65536", "unix-abstract:", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Start({wrong}).status())) << wrong;
  }
}

TEST(SystemResolverTest, KnowsThisHostAndSaysWhatIsWrongWithOthers) {
  const auto resolver = NewSystemResolver();
  const auto local = resolver->Resolve("localhost");
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_THAT(*local, Contains(AnyOf("127.0.0.1", "::1")));
  EXPECT_FALSE(resolver->Resolve("no-such-name.invalid").ok());
}

// What a router makes of it.
class ChangingGroupsTest : public RouterFixture {};

TEST_F(ChangingGroupsTest, RequestsGoToWhoIsThereAndThoseUnderWayGoOn) {
  StartOne();
  const auto first = Send(TextRequest("x"));
  const auto running = worker(0).TakeCall();
  running->Send({'a'});
  worker_addresses_.push_back(UniqueAddress("leader"));
  workers_.push_back(std::make_unique<FakeWorker>(worker_addresses_[1]));
  cluster_->SetGroups({worker_addresses_[1]});
  WaitUntilReady(0);
  ASSERT_EQ(cluster_->Snapshot()->groups.size(), 1U);
  EXPECT_EQ(cluster_->Snapshot()->groups[0]->info.address(), worker_addresses_[1]);
  const auto second = Send(TextRequest("x"));
  const auto call = worker(1).TakeCall();
  call->Send({'b'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(second->Wait().ok()) << second->Wait();
  running->Send({'c'}, v1::FINISH_REASON_LENGTH);
  running->End();
  EXPECT_TRUE(first->Wait().ok()) << first->Wait();
  EXPECT_EQ(first->Text(), "ac");
  // One that comes back is as any other.
  cluster_->SetGroups(worker_addresses_);
  for (std::size_t i = 0; i < 2; ++i) WaitUntilReady(i);
  StopRouter();
}

TEST_F(ChangingGroupsTest, RequestsWaitForTheFirstGroup) {
  StartRouter({});
  const auto stream = Send(TextRequest("x"));
  while (cluster_->num_waiting() == 0) absl::SleepFor(absl::Milliseconds(1));
  worker_addresses_.push_back(UniqueAddress("leader"));
  workers_.push_back(std::make_unique<FakeWorker>(worker_addresses_[0]));
  cluster_->SetGroups(worker_addresses_);
  const auto call = worker(0).TakeCall();
  call->Send({'b'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(stream->Wait().ok()) << stream->Wait();
  StopRouter();
}

}  // namespace
}  // namespace weft
