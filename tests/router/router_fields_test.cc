// The text side of every field of Generate, against scripted leaders over real gRPC.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "grpcpp/client_context.h"
#include "gtest/gtest.h"
#include "server/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RouterFieldsTest : public RouterFixture {
 protected:
  absl::Status Abort(const std::string& request_id) {
    grpc::ClientContext context;
    v1::AbortRequest request;
    request.set_request_id(request_id);
    v1::AbortResponse response;
    return FromGrpcStatus(stub_->Abort(&context, request, &response));
  }
  static v1::GenerateRequest Named(std::string id) {
    v1::GenerateRequest request = TextRequest("x");
    request.set_request_id(std::move(id));
    return request;
  }
};

TEST_F(RouterFieldsTest, AStopStringEndsTheLeadersCallAndTheStream) {
  StartOne();
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->add_stop("STOP");
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  EXPECT_THAT(call->request().sampling().stop(), IsEmpty());
  for (const char c : std::string_view("a STOP b")) call->Send({c});
  call->WaitUntilCancelled();
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "a ");
  EXPECT_EQ(stream->TokenIds(), ByteIds("a STOP"));
  EXPECT_EQ(stream->Last().finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(stream->Last().stop(), "STOP");
  EXPECT_EQ(stream->Last().usage().completion_tokens(), 6);
}

TEST_F(RouterFieldsTest, BadWordsArriveAsTokens) {
  StartOne();
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->add_bad_words(" ab");
  request.mutable_sampling()->add_bad_words_token_ids()->add_ids(7);
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  const v1::SamplingParams& sampling = call->request().sampling();
  EXPECT_THAT(sampling.bad_words(), IsEmpty());
  ASSERT_EQ(sampling.bad_words_token_ids_size(), 2);
  EXPECT_THAT(sampling.bad_words_token_ids(0).ids(), ElementsAre(7));
  EXPECT_THAT(sampling.bad_words_token_ids(1).ids(), ElementsAre('a', 'b'));
}

TEST_F(RouterFieldsTest, PriorityAndTheLeadersFieldsArriveAsTheyWereGiven) {
  StartOne();
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(7);
  request.set_priority(-3);
  request.set_cache_salt("a tenant's");
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_seed(5);
  sampling.set_min_p(0);
  sampling.set_presence_penalty(-2);
  sampling.set_frequency_penalty(2);
  sampling.set_repetition_penalty(10);
  sampling.set_min_tokens(0);
  (*sampling.mutable_logit_bias())[299] = -100;
  sampling.add_allowed_token_ids(0);
  sampling.set_logprobs(0);
  sampling.set_prompt_logprobs(20);
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  EXPECT_EQ(call->request().priority(), -3);
  EXPECT_EQ(call->request().cache_salt(), "a tenant's");
  EXPECT_EQ(call->request().sampling().ShortDebugString(), sampling.ShortDebugString());
}

TEST_F(RouterFieldsTest, LogprobsAndCachedTokensPassThrough) {
  StartOne();
  const auto stream = Send(TextRequest("xy"));
  const auto call = worker().TakeCall();
  v1::WorkerGenerateResponse response;
  response.add_prompt_logprobs()->mutable_token()->set_logprob(-1);
  response.set_cached_tokens(1);
  call->Send(response);
  response.Clear();
  response.add_token_ids('a');
  v1::PositionLogprobs& position = *response.add_logprobs();
  position.mutable_token()->set_logprob(-2);
  position.add_top()->set_logprob(-0.5);
  response.set_finish_reason(v1::FINISH_REASON_LENGTH);
  call->Send(response);
  call->End();
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  ASSERT_EQ(stream->responses().size(), 1);
  const v1::GenerateResponse& message = stream->responses()[0];
  EXPECT_EQ(message.prompt_logprobs(0).token().logprob(), -1);
  EXPECT_EQ(message.logprobs(0).top(0).logprob(), -0.5);
  EXPECT_EQ(message.usage().cached_tokens(), 1);
}

TEST_F(RouterFieldsTest, SamplesAreRequestsOfTheirOwnOnOneStream) {
  StartOne();
  constexpr int kSamples = 4;
  v1::GenerateRequest request = TextRequest("xy");
  request.set_request_id("id");
  request.mutable_sampling()->set_n(kSamples);
  request.mutable_sampling()->set_seed(UINT64_MAX);  // the sum wraps
  request.mutable_sampling()->set_prompt_logprobs(0);
  request.mutable_sampling()->add_stop("!");
  const auto stream = Send(request);
  std::map<std::string, std::shared_ptr<FakeWorker::Call>> calls;
  for (int i = 0; i < kSamples; ++i) {
    const auto call = worker().TakeCall();
    calls[call->request().request_id()] = call;
  }
  for (int i = 0; i < kSamples; ++i) {
    const auto& call = calls[std::to_string(i) + ":id"];
    ASSERT_NE(call, nullptr) << i;
    EXPECT_EQ(call->request().sampling().seed(), static_cast<std::uint64_t>(i) - 1);
    EXPECT_FALSE(call->request().sampling().has_n());
    // The prompt is the same: its logprobs come once.
    EXPECT_EQ(call->request().sampling().has_prompt_logprobs(), i == 0);
    EXPECT_THAT(call->request().prompt_token_ids(), ElementsAre('x', 'y'));
  }
  for (const char c : std::string_view("abc")) {
    for (int i = kSamples - 1; i >= 0; --i) calls[std::to_string(i) + ":id"]->Send({c + i});
  }
  calls["1:id"]->Send({'!', 'z'});
  for (int i = 0; i < kSamples; ++i) {
    if (i != 1) calls[std::to_string(i) + ":id"]->Send({'.'}, v1::FINISH_REASON_LENGTH);
    calls[std::to_string(i) + ":id"]->End();
  }
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  for (int i = 0; i < kSamples; ++i) {
    std::string text;
    for (const char c : std::string_view("abc")) text += static_cast<char>(c + i);
    EXPECT_EQ(stream->Text(i), i == 1 ? text : text + ".");
    EXPECT_EQ(stream->Last(i).usage().completion_tokens(), 4);
    EXPECT_EQ(stream->Last(i).finish_reason(),
              i == 1 ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
  }
  for (std::size_t i = 0; i < stream->responses().size(); ++i) {
    const v1::GenerateResponse& message = stream->responses()[i];
    EXPECT_EQ(message.seq(), i);  // numbers the whole stream
    EXPECT_EQ(message.request_id(), "id");
    EXPECT_EQ(message.prompt_token_ids_size(), i == 0 ? 2 : 0);
  }
}

TEST_F(RouterFieldsTest, OneSampleThatFailsFailsTheCall) {
  StartOne();
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->set_n(3);
  const auto stream = Send(request);
  std::vector<std::shared_ptr<FakeWorker::Call>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(worker().TakeCall());
  calls[0]->Send({'a'}, v1::FINISH_REASON_LENGTH);
  calls[0]->End();
  calls[2]->End(absl::InternalError("broken"));
  EXPECT_TRUE(absl::IsInternal(stream->Wait())) << stream->Wait();
  calls[1]->WaitUntilCancelled();
}

TEST_F(RouterFieldsTest, ACancelEndsEverySample) {
  StartOne();
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->set_n(3);
  const auto stream = Send(request);
  std::vector<std::shared_ptr<FakeWorker::Call>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(worker().TakeCall());
  stream->Cancel();
  for (const auto& call : calls) call->WaitUntilCancelled();
  EXPECT_TRUE(absl::IsCancelled(stream->Wait())) << stream->Wait();
  StopRouter();
  EXPECT_THAT(registry_.All(), IsEmpty());
}

TEST_F(RouterFieldsTest, ASlowReaderOfManySamplesIsCutOffByBytesNotByTheirNumber) {
  context_.max_stream_buffer_bytes = 1 << 20;
  StartOne();
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_sampling()->set_n(8);
  grpc::ClientContext context;
  const auto slow = stub_->Generate(&context, request);  // and reads nothing
  std::vector<std::shared_ptr<FakeWorker::Call>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(worker().TakeCall());
  for (int i = 0; i < 200; ++i) {
    for (const auto& call : calls) EXPECT_TRUE(call->Send({'a'}));
  }
  for (const auto& call : calls) {
    EXPECT_TRUE(call->Send({'b'}, v1::FINISH_REASON_LENGTH));
    call->End();
  }
  std::map<int, std::string> texts;
  v1::GenerateResponse message;
  while (slow->Read(&message)) texts[message.index()] += message.text();
  EXPECT_TRUE(slow->Finish().ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(texts[i], std::string(200, 'a') + "b") << i;
}

TEST_F(RouterFieldsTest, AResumedRequestGoesOn) {
  StartOne();
  v1::GenerateRequest request = TextRequest("xy");
  request.mutable_sampling()->add_stop("STOP");
  request.mutable_sampling()->set_prompt_logprobs(1);
  for (const std::int32_t id : ByteIds("ab ST")) request.mutable_resume()->add_ids(id);
  request.set_resume_seq(5);
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  EXPECT_THAT(call->request().resume_token_ids(), ElementsAre('a', 'b', ' ', 'S', 'T'));
  EXPECT_FALSE(call->request().sampling().has_prompt_logprobs());  // the client has them
  call->Send({'O'});
  call->Send({'P'});
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Text(), "");  // "ab " went out before
  EXPECT_EQ(stream->Last().stop(), "STOP");
  EXPECT_EQ(stream->Last().usage().completion_tokens(), 7);
  EXPECT_EQ(stream->responses()[0].seq(), 5);
  EXPECT_EQ(stream->Last().seq(), 6);
  EXPECT_THAT(stream->responses()[0].prompt_token_ids(), IsEmpty());
}

TEST_F(RouterFieldsTest, AResumedRequestThatWasAtItsEndEnds) {
  StartOne();
  v1::GenerateRequest request = TextRequest("xy");
  request.mutable_sampling()->add_stop("b");
  for (const std::int32_t id : ByteIds("ab")) request.mutable_resume()->add_ids(id);
  request.set_resume_seq(2);
  const auto stream = Send(request);
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Last().stop(), "b");
  EXPECT_EQ(stream->Last().seq(), 2);
  EXPECT_EQ(worker().num_calls_waiting(), 0);
}

TEST_F(RouterFieldsTest, AnAbortEndsARunningRequestWithWhatItHas) {
  StartOne();
  v1::GenerateRequest request = Named("mine");
  request.mutable_sampling()->add_stop("STOP");
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  for (const char c : std::string_view("abST")) call->Send({c});
  while (worker().num_calls_waiting() > 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(Abort("other").ok());  // disturbs nobody
  EXPECT_TRUE(Abort("mine").ok());
  EXPECT_TRUE(Abort("mine").ok());
  call->WaitUntilCancelled();
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Last().finish_reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_THAT("abST", ::testing::StartsWith(stream->Text()));
  EXPECT_EQ(stream->Last().usage().completion_tokens(),
            static_cast<int>(stream->TokenIds().size()));
  EXPECT_TRUE(Abort("mine").ok());  // ended, and unknown now
}

TEST_F(RouterFieldsTest, AnAbortEndsEverySampleThatIsNotFinished) {
  StartOne();
  v1::GenerateRequest request = Named("mine");
  request.mutable_sampling()->set_n(3);
  const auto stream = Send(request);
  std::vector<std::shared_ptr<FakeWorker::Call>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(worker().TakeCall());
  const int finished = calls[0]->request().request_id().front() - '0';
  calls[0]->Send({'a'}, v1::FINISH_REASON_LENGTH);
  calls[0]->End();
  while (!stream->ended() && registry_.Find("mine") != nullptr) {
    // The first one's end has to arrive before the abort, in whatever way.
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_TRUE(Abort("mine").ok());
  }
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  for (int i = 0; i < 3; ++i) {
    const bool aborted = stream->Last(i).finish_reason() == v1::FINISH_REASON_ABORTED;
    EXPECT_TRUE(aborted || i == finished) << i;
    EXPECT_NE(stream->Last(i).finish_reason(), v1::FINISH_REASON_UNSPECIFIED) << i;
  }
}

TEST_F(RouterFieldsTest, AnAbortEndsARequestThatWaitsForAGroup) {
  StartRouter({UniqueAddress("nobody")});
  const auto stream = Send(Named("mine"));
  while (cluster_->num_waiting() == 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(Abort("mine").ok());
  ASSERT_TRUE(stream->Wait().ok()) << stream->Wait();
  EXPECT_EQ(stream->Last().finish_reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_EQ(stream->Last().usage().completion_tokens(), 0);
  EXPECT_EQ(stream->Last().usage().prompt_tokens(), 1);
}

TEST_F(RouterFieldsTest, ARequestIdInUseIsRefusedAndFreeAfterwards) {
  StartOne();
  const auto first = Send(Named("mine"));
  const auto call = worker().TakeCall();
  const auto second = Send(Named("mine"));
  EXPECT_TRUE(absl::IsAlreadyExists(second->Wait())) << second->Wait();
  EXPECT_THAT(std::string(second->Wait().message()), HasSubstr("\"mine\""));
  call->Send({'a'}, v1::FINISH_REASON_LENGTH);
  call->End();
  EXPECT_TRUE(first->Wait().ok()) << first->Wait();
  // Again, at once: the leader may still have the first one, which the third takes over from.
  const auto third = Send(Named("mine"));
  const auto third_call = worker().TakeCall();
  EXPECT_GT(third_call->request().attempt(), call->request().attempt());
  third_call->Send({'b'}, v1::FINISH_REASON_LENGTH);
  third_call->End();
  EXPECT_TRUE(third->Wait().ok()) << third->Wait();
}

TEST_F(RouterFieldsTest, AChatIsRenderedWithTheModelsTemplate) {
  const auto chat_template = ChatTemplate::Load(WEFT_SOURCE_DIR "/tests/data/llama_gqa");
  ASSERT_TRUE(chat_template.ok()) << chat_template.status();
  context_.chat_template = chat_template->get();
  StartOne();
  v1::GenerateRequest request;
  v1::ChatMessage& message = *request.mutable_chat()->add_messages();
  message.set_role(v1::ROLE_USER);
  message.set_content("Hi");
  const auto stream = Send(request);
  const auto call = worker().TakeCall();
  const std::vector<std::int32_t> prompt(call->request().prompt_token_ids().begin(),
                                         call->request().prompt_token_ids().end());
  EXPECT_EQ(prompt, ByteIds("<|user|>Hi<eos><|assistant|>"));
}

TEST_F(RouterFieldsTest, AChatWithoutATemplateIsRefused) {
  StartOne();
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages()->set_role(v1::ROLE_USER);
  const auto stream = Send(request);
  EXPECT_TRUE(absl::IsInvalidArgument(stream->Wait())) << stream->Wait();
  EXPECT_THAT(std::string(stream->Wait().message()), HasSubstr("chat template"));
}

TEST_F(RouterFieldsTest, ADrainLetsRequestsFinishAndEndsTheRestAsDraining) {
  StartOne();
  const auto finishes = Send(TextRequest("x"));
  const auto finishing_call = worker().TakeCall();
  const auto stays = Send(TextRequest("x"));
  const auto staying_call = worker().TakeCall();
  std::thread drain([this] { service_->Drain(absl::Milliseconds(500)); });
  std::unique_ptr<Stream> late;
  do {  // until the drain has begun
    late = Send(TextRequest("x"));
    while (!late->ended() && worker().num_calls_waiting() == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    if (!late->ended()) worker().TakeCall();
  } while (!late->ended());
  EXPECT_EQ(ReasonOf(late->Wait()), kReasonDraining) << late->Wait();
  EXPECT_TRUE(RetryAfterOf(late->Wait()).has_value());
  finishing_call->Send({'a'}, v1::FINISH_REASON_LENGTH);
  finishing_call->End();
  EXPECT_TRUE(finishes->Wait().ok()) << finishes->Wait();
  EXPECT_EQ(ReasonOf(stays->Wait()), kReasonDraining) << stays->Wait();
  staying_call->WaitUntilCancelled();
  drain.join();
}

TEST_F(RouterFieldsTest, ADrainLetsTextCallsFinishAndTakesNoMore) {
  StartOne();
  const auto tokenize = [this] {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    request.set_text("x");
    v1::TokenizeResponse response;
    return FromGrpcStatus(stub_->Tokenize(&context, request, &response));
  };
  std::atomic<bool> busy = true;
  for (int i = 0; i < 2; ++i) {  // as many as the pool has threads
    ASSERT_TRUE(text_pool_->Submit([&busy] { busy.wait(true); }).ok());
  }
  while (text_pool_->num_waiting() > 0) std::this_thread::yield();
  absl::Status first;
  std::thread caller([&] { first = tokenize(); });
  while (text_pool_->num_waiting() == 0) std::this_thread::yield();
  std::thread drain([this] { service_->Drain(absl::Hours(1)); });
  while (registry_.CheckDrain().ok()) std::this_thread::yield();
  EXPECT_EQ(ReasonOf(tokenize()), kReasonDraining);
  EXPECT_FALSE(registry_.WaitForNoStreams(std::chrono::steady_clock::now()));
  busy = false;
  busy.notify_all();
  caller.join();
  drain.join();
  EXPECT_TRUE(first.ok()) << first;
}

TEST_F(RouterFieldsTest, RequestsInFlightAreBounded) {
  RequestRegistry one(1);
  context_.registry = &one;
  StartOne();
  const auto first = Send(TextRequest("x"));
  const auto call = worker().TakeCall();
  const auto second = Send(TextRequest("x"));
  EXPECT_TRUE(absl::IsResourceExhausted(second->Wait())) << second->Wait();
  EXPECT_EQ(ReasonOf(second->Wait()), kReasonOverloaded);
  EXPECT_TRUE(RetryAfterOf(second->Wait()).has_value());
  first->Cancel();
  first->Wait();
  StopRouter();
}

}  // namespace
}  // namespace weft
