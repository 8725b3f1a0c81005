#include "router/tenants.h"

#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "server/grpc_status.h"
#include "tests/router/router_fixture.h"
#include "tests/temp_dir.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// --- Limits of one tenant, in a time of our own.

std::shared_ptr<Tenant> MakeTenant(const TenantLimits& limits, absl::Time now) {
  return std::make_shared<Tenant>("a", limits, now);
}

TEST(TenantTest, AsManyRequestsAsMayRunAtATime) {
  const absl::Time now = absl::UnixEpoch();
  const auto tenant = MakeTenant({.max_concurrent_requests = 2}, now);
  auto first = tenant->StartRequest(now);
  const auto second = tenant->StartRequest(now);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status third = tenant->StartRequest(now).status();
  EXPECT_TRUE(absl::IsResourceExhausted(third)) << third;
  EXPECT_EQ(ReasonOf(third), kReasonConcurrencyLimit);
  EXPECT_NE(RetryAfterOf(third), std::nullopt);
  *first = nullptr;
  EXPECT_TRUE(tenant->StartRequest(now).ok());
}

TEST(TenantTest, TokensComeBackAtTheRateAndNoSooner) {
  absl::Time now = absl::UnixEpoch();
  const auto tenant = MakeTenant({.tokens_per_minute = 600, .burst_tokens = 100}, now);
  EXPECT_EQ(tenant->TakePrompt(100, now), absl::OkStatus()) << "the whole burst";
  const absl::Status refused = tenant->TakePrompt(1, now);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(ReasonOf(refused), kReasonRateLimit);
  EXPECT_TRUE(absl::IsResourceExhausted(tenant->StartRequest(now).status()));
  ASSERT_EQ(RetryAfterOf(refused), absl::Milliseconds(100)) << "10 tokens a second";
  EXPECT_EQ(tenant->TakePrompt(1, now + absl::Milliseconds(101)), absl::OkStatus());

  // What was generated is owed: 50 tokens are 5 seconds.
  now += absl::Seconds(100);
  EXPECT_EQ(tenant->TakePrompt(100, now), absl::OkStatus());
  tenant->AddCompletion(50, now);
  EXPECT_TRUE(absl::IsResourceExhausted(tenant->TakePrompt(1, now + absl::Milliseconds(5099))));
  EXPECT_EQ(tenant->TakePrompt(1, now + absl::Milliseconds(5101)), absl::OkStatus());
}

TEST(TenantTest, APromptLongerThanTheBurstGoesWhenNothingIsOwed) {
  const absl::Time now = absl::UnixEpoch();
  const auto tenant = MakeTenant({.tokens_per_minute = 60, .burst_tokens = 10}, now);
  EXPECT_EQ(tenant->TakePrompt(1000, now), absl::OkStatus());
  EXPECT_EQ(RetryAfterOf(tenant->TakePrompt(1, now)), absl::Seconds(991));
}

// Over any stretch of time: at most the burst, what came in it, and one request that went over.
TEST(TenantTest, NoStretchOfTimeHasMoreThanItsTokens) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const TenantLimits limits = {.tokens_per_minute = 6000, .burst_tokens = 500};
  constexpr std::int64_t kLongest = 200;
  absl::Time now = absl::UnixEpoch();
  const auto tenant = MakeTenant(limits, now);
  std::vector<std::pair<absl::Time, std::int64_t>> taken;
  for (int i = 0; i < 2000; ++i) {
    now += absl::Milliseconds(static_cast<std::int64_t>(random() % 300));
    const auto tokens = static_cast<std::int64_t>(1 + random() % kLongest);
    if (tenant->TakePrompt(tokens, now).ok()) taken.emplace_back(now, tokens);
  }
  ASSERT_GT(taken.size(), 100U);
  for (std::size_t first = 0; first < taken.size(); ++first) {
    std::int64_t sum = 0;
    for (std::size_t last = first; last < taken.size(); ++last) {
      sum += taken[last].second;
      const double minutes =
          absl::FDivDuration(taken[last].first - taken[first].first, absl::Minutes(1));
      ASSERT_LE(static_cast<double>(sum), 500 + 6000 * minutes + kLongest + 1e-6);
    }
  }
}

// --- The file.

class TenantsTest : public RouterFixture {
 protected:
  void Write(const std::string& text) {
    std::ofstream(path_ + ".new") << text;
    std::rename((path_ + ".new").c_str(), path_.c_str());
  }
  std::string LoadError(const std::string& text) {
    Write(text);
    return std::string(Tenants::Load(path_).status().message());
  }
  std::string NameOfKey(std::optional<std::string_view> key) {
    const auto tenant = tenants_->Authenticate(key);
    return tenant.ok() ? (*tenant)->name() : std::string(tenant.status().message());
  }

  // A router with two tenants, and a client for each.
  void StartTwo(const std::string& limits = "") {
    Write(R"({"tenants": [{"name": "a", "api_keys": ["key-of-a"])" + limits +
          R"(}, {"name": "b", "api_keys": ["key-of-b"]}]})");
    tenants_ = *Tenants::Load(path_);
    context_.tenants = tenants_.get();
    StartOne();
    a_ = ClientWith("key-of-a");
    b_ = ClientWith("key-of-b");
  }
  std::unique_ptr<v1::Inference::Stub> ClientWith(const std::string& key) {
    return v1::Inference::NewStub(NewGrpcChannel(server_->addresses()[0], {.bearer_token = key}));
  }
  static v1::GenerateRequest Request(const std::string& id) {
    v1::GenerateRequest request = TextRequest("hi");
    request.set_request_id(id);
    return request;
  }
  static absl::Status Abort(v1::Inference::Stub& stub, const std::string& id) {
    grpc::ClientContext context;
    v1::AbortRequest request;
    request.set_request_id(id);
    v1::AbortResponse response;
    return FromGrpcStatus(stub.Abort(&context, request, &response));
  }

  TempDir dir_;
  const std::string path_ = dir_.path() / "keys.json";
  std::unique_ptr<Tenants> tenants_;
  std::unique_ptr<v1::Inference::Stub> a_;
  std::unique_ptr<v1::Inference::Stub> b_;
};

TEST_F(TenantsTest, AFileThatIsWrongIsRefusedWithoutSayingItsKeys) {
  const std::string tenant = R"("name": "a", "api_keys": ["SECRET"])";
  const std::pair<std::string, std::string> cases[] = {
      {"SECRET", "no JSON object"},
      {"[]", "no JSON object"},
      {R"({"tenants": {}})", "list \"tenants\""},
      {R"({"tenants": [], "SECRET": 1})", "another field"},
      {R"({"tenants": [{"api_keys": ["SECRET"]}]})", "tenants[0] has no name"},
      {R"({"tenants": [{"name": "a/b", "api_keys": ["SECRET"]}]})", "letters, digits"},
      {R"({"tenants": [{"name": "a"}]})", "api_keys is not a list"},
      {R"({"tenants": [{"name": "a", "api_keys": []}]})", "api_keys is not a list"},
      {R"({"tenants": [{"name": "a", "api_keys": ["SECRET", "SECRET 2"]}]})", "api_keys[1]"},
      {R"({"tenants": [{"name": "a", "api_keys": [""]}]})", "api_keys[0]"},
      {"{\"tenants\": [{" + tenant + "}, {" + tenant + "}]}", "tenants[1] (\"a\"): the name"},
      {"{\"tenants\": [{" + tenant + R"(}, {"name": "b", "api_keys": ["SECRET"]}]})",
       "one of its keys is one of \"a\""},
      {"{\"tenants\": [{" + tenant + R"(, "SECRET": 1}]})", "another field"},
      {"{\"tenants\": [{" + tenant + R"(, "tokens_per_minute": 0}]})", "tokens_per_minute is 0"},
      {"{\"tenants\": [{" + tenant + R"(, "tokens_per_minute": "SECRET"}]})", "is string"},
      {"{\"tenants\": [{" + tenant + R"(, "max_concurrent_requests": 1.5}]})", "is 1.5"},
      {"{\"tenants\": [{" + tenant + R"(, "burst_tokens": 1}]})", "needs tokens_per_minute"},
      {"{\"tenants\": [{" + tenant + R"(, "min_priority": 1}]})", "min_priority is 1"},
      {"{\"tenants\": [{" + tenant + R"(, "min_priority": -2147483649}]})", "is -2147483649"},
      {"{\"tenants\": [{" + tenant + R"(, "min_priority": "SECRET"}]})", "is string"},
  };
  for (const auto& [text, why] : cases) {
    const std::string error = LoadError(text);
    EXPECT_THAT(error, HasSubstr(why)) << text;
    EXPECT_THAT(error, HasSubstr("--api-keys-file: " + path_)) << text;
    EXPECT_THAT(error, Not(HasSubstr("SECRET"))) << text;
  }
  EXPECT_EQ(LoadError(R"({"tenants": []})"), "");
  EXPECT_THAT(std::string(Tenants::Load("/none").status().message()), HasSubstr("No such file"));
}

TEST_F(TenantsTest, ANewFileCountsAndABrokenOneDoesNot) {
  Write(R"({"tenants": [{"name": "a", "api_keys": ["one"], "max_concurrent_requests": 1}]})");
  tenants_ = *Tenants::Load(path_);
  const auto place = (*tenants_->Authenticate("one"))->StartRequest(absl::Now());
  ASSERT_TRUE(place.ok());

  Write(R"({"tenants": [{"name": "a", "api_keys": ["two", "one"], "max_concurrent_requests": 1},
                        {"name": "b", "api_keys": ["three"]}]})");
  EXPECT_EQ(NameOfKey("two"), "the API key is nobody's here") << "not read yet";
  tenants_->Reload();
  EXPECT_EQ(NameOfKey("one"), "a");
  EXPECT_EQ(NameOfKey("two"), "a");
  EXPECT_EQ(NameOfKey("three"), "b");
  EXPECT_TRUE(absl::IsResourceExhausted(
      (*tenants_->Authenticate("two"))->StartRequest(absl::Now()).status()))
      << "what is used stays";

  Write("{");
  tenants_->Reload();
  EXPECT_EQ(NameOfKey("three"), "b");
  std::filesystem::remove(path_);
  tenants_->Reload();
  EXPECT_EQ(NameOfKey("three"), "b");

  Write(R"({"tenants": [{"name": "b", "api_keys": ["three"]}]})");
  tenants_->Reload();
  EXPECT_EQ(NameOfKey("one"), "the API key is nobody's here");
  EXPECT_EQ(NameOfKey("three"), "b");
  EXPECT_THAT(NameOfKey(std::nullopt), HasSubstr("no API key"));
  EXPECT_EQ(NameOfKey(""), "the API key is nobody's here");
}

// --- At the router.

TEST_F(TenantsTest, EveryMethodWantsAKey) {
  StartTwo();
  const auto stranger = ClientWith("key-of-c");
  for (v1::Inference::Stub* stub : {stub_.get(), stranger.get()}) {
    Stream stream(*stub, Request("x"));
    EXPECT_TRUE(absl::IsUnauthenticated(stream.Wait())) << stream.Wait();
    EXPECT_THAT(std::string(stream.Wait().message()), Not(HasSubstr("key-of")));
    EXPECT_TRUE(absl::IsUnauthenticated(Abort(*stub, "x")));
    const auto call = [&](auto method, const auto& request, auto response) {
      grpc::ClientContext context;
      return FromGrpcStatus((stub->*method)(&context, request, &response));
    };
    using Stub = v1::Inference::Stub;
    for (const absl::Status& status :
         {call(&Stub::Tokenize, v1::TokenizeRequest(), v1::TokenizeResponse()),
          call(&Stub::Detokenize, v1::DetokenizeRequest(), v1::DetokenizeResponse()),
          call(&Stub::GetModelInfo, v1::GetModelInfoRequest(), v1::GetModelInfoResponse()),
          call(&Stub::GetServerInfo, v1::GetServerInfoRequest(), v1::GetServerInfoResponse())}) {
      EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
    }
  }
  EXPECT_EQ(worker().num_calls_waiting(), 0);
  EXPECT_EQ(Abort(*a_, "x"), absl::OkStatus());
}

TEST_F(TenantsTest, RequestIdsAndCachesAreATenantsOwn) {
  StartTwo();
  v1::GenerateRequest request = Request("same");
  request.set_cache_salt("salt");
  Stream of_a(*a_, request);
  const auto call_of_a = worker().TakeCall();
  Stream of_b(*b_, request);
  const auto call_of_b = worker().TakeCall();
  EXPECT_NE(call_of_a->request().request_id(), call_of_b->request().request_id());
  EXPECT_NE(call_of_a->request().cache_salt(), call_of_b->request().cache_salt());
  Stream without_salt(*a_, Request("other"));
  const auto call_without_salt = worker().TakeCall();
  EXPECT_NE(call_without_salt->request().cache_salt(), "");
  EXPECT_NE(call_without_salt->request().cache_salt(), call_of_a->request().cache_salt());

  Stream again(*a_, request);
  EXPECT_TRUE(absl::IsAlreadyExists(again.Wait())) << "within a tenant an id is in use";
  // The other's id, as it is known inside, is nobody's name outside.
  EXPECT_EQ(Abort(*b_, "a/same"), absl::OkStatus());
  EXPECT_EQ(Abort(*b_, "same"), absl::OkStatus());
  call_of_b->WaitUntilCancelled();
  EXPECT_EQ(of_b.Wait(), absl::OkStatus());
  EXPECT_EQ(of_b.Last().finish_reason(), v1::FINISH_REASON_ABORTED);
  call_of_a->Send(ByteIds("ok"), v1::FINISH_REASON_LENGTH);
  call_of_a->End();
  EXPECT_EQ(of_a.Wait(), absl::OkStatus());
  EXPECT_EQ(of_a.Text(), "ok");
  EXPECT_EQ(of_a.Last().request_id(), "same");
}

TEST_F(TenantsTest, OneTenantsLimitIsNotAnothers) {
  StartTwo(R"(, "max_concurrent_requests": 1)");
  Stream first(*a_, Request("1"));
  const auto call = worker().TakeCall();
  Stream second(*a_, Request("2"));
  EXPECT_EQ(ReasonOf(second.Wait()), kReasonConcurrencyLimit);
  EXPECT_NE(RetryAfterOf(second.Wait()), std::nullopt);
  Stream other(*b_, Request("1"));
  Answer("x");
  EXPECT_EQ(other.Wait(), absl::OkStatus());

  // A place is free again before the client can know of it.
  call->Send(ByteIds("x"), v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  for (int i = 0; i < 50; ++i) {
    Stream next(*a_, Request("next"));
    Answer("x");
    ASSERT_EQ(next.Wait(), absl::OkStatus());
  }
  // Also after one that was refused further on.
  Stream bad(*a_, [] {
    v1::GenerateRequest request = Request("bad");
    request.mutable_sampling()->set_top_p(7);
    return request;
  }());
  EXPECT_TRUE(absl::IsInvalidArgument(bad.Wait()));
  Stream last(*a_, Request("last"));
  Answer("x");
  EXPECT_EQ(last.Wait(), absl::OkStatus());
}

TEST_F(TenantsTest, ATenantWithALongQueueDoesNotHoldUpAnother) {
  StartTwo();
  v1::GroupState one_place = FakeWorker::ReadyState();
  one_place.mutable_group()->set_max_num_seqs(1);
  worker().SetState(one_place);
  while (cluster_->Snapshot()->groups[0]->info.max_num_seqs() != 1) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  Stream running(*a_, Request("a0"));
  const auto call = worker().TakeCall();
  std::vector<std::unique_ptr<Stream>> waiting;
  for (const char* id : {"a1", "a2", "a3", "b1", "b2"}) {
    waiting.push_back(std::make_unique<Stream>(id[0] == 'a' ? *a_ : *b_, Request(id)));
    while (cluster_->num_waiting() != static_cast<std::int64_t>(waiting.size())) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  call->Send(ByteIds("x"), v1::FINISH_REASON_LENGTH);
  call->End();
  std::string order;
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    const auto next = worker().TakeCall();
    order += next->request().request_id().substr(std::string("0:a/").size()) + " ";
    next->Send(ByteIds("x"), v1::FINISH_REASON_LENGTH);
    next->End();
  }
  EXPECT_EQ(order, "a1 b1 a2 b2 a3 ");
  EXPECT_EQ(running.Wait(), absl::OkStatus());
  for (const auto& stream : waiting) EXPECT_EQ(stream->Wait(), absl::OkStatus());
}

TEST_F(TenantsTest, ATenantComesBeforeOthersAsFarAsItMay) {
  StartTwo(R"(, "min_priority": -2)");
  v1::GenerateRequest request = Request("1");
  request.set_priority(-3);
  Stream refused(*a_, request);
  EXPECT_TRUE(absl::IsInvalidArgument(refused.Wait())) << refused.Wait();
  EXPECT_THAT(std::string(refused.Wait().message()), HasSubstr("priority is -3"));
  request.set_priority(-2);
  Stream first(*a_, request);
  Answer("x");
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  request.set_priority(-1);
  Stream other(*b_, request);
  EXPECT_TRUE(absl::IsInvalidArgument(other.Wait())) << other.Wait();
}

TEST_F(TenantsTest, PromptsAndCompletionsCountAgainstTheRate) {
  StartTwo(R"(, "tokens_per_minute": 1, "burst_tokens": 5)");
  Stream first(*a_, Request("1"));  // a prompt of 2
  const auto call = worker().TakeCall();
  call->Send(ByteIds("abc"));
  call->Send({}, v1::FINISH_REASON_LENGTH);
  call->End();
  ASSERT_EQ(first.Wait(), absl::OkStatus());
  Stream second(*a_, Request("2"));
  EXPECT_EQ(ReasonOf(second.Wait()), kReasonRateLimit) << second.Wait();
  EXPECT_GT(RetryAfterOf(second.Wait()), absl::Seconds(50));
  Stream other(*b_, Request("2"));
  Answer("x");
  EXPECT_EQ(other.Wait(), absl::OkStatus());
}

}  // namespace
}  // namespace weft
