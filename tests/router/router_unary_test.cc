// Tokenize, Detokenize, GetModelInfo and what every method does with bad bytes.

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "server/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RouterUnaryTest : public RouterFixture {
 protected:
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request) {
    grpc::ClientContext context;
    v1::TokenizeResponse response;
    const absl::Status status = FromGrpcStatus(stub_->Tokenize(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }
  absl::StatusOr<std::string> Detokenize(const v1::DetokenizeRequest& request) {
    grpc::ClientContext context;
    v1::DetokenizeResponse response;
    const absl::Status status = FromGrpcStatus(stub_->Detokenize(&context, request, &response));
    if (!status.ok()) return status;
    return response.text();
  }
  absl::Status SendBytes(const std::string& method, const std::string& bytes) {
    grpc::GenericStub stub(channel_);
    grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const auto call =
        stub.PrepareUnaryCall(&context, "/weft.v1.Inference/" + method, request, &queue);
    grpc::Status status;
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    return FromGrpcStatus(status);
  }
};

TEST_F(RouterUnaryTest, TokenizesTextAsGenerateReadsIt) {
  StartOne();
  v1::TokenizeRequest request;
  request.set_text("ab<end>");
  EXPECT_THAT(Tokenize(request).value().token_ids(), ElementsAre('a', 'b', kEndToken));
}

TEST_F(RouterUnaryTest, TokenizesChatsWithTheTemplate) {
  const auto chat_template = ChatTemplate::Load(WEFT_SOURCE_DIR "/tests/data/llama_gqa");
  ASSERT_TRUE(chat_template.ok()) << chat_template.status();
  context_.chat_template = chat_template->get();
  StartOne();
  v1::TokenizeRequest request;
  v1::ChatMessage& message = *request.mutable_chat()->add_messages();
  message.set_role(v1::ROLE_SYSTEM);
  message.set_content("s");
  const v1::TokenizeResponse response = Tokenize(request).value();
  EXPECT_EQ((std::vector<std::int32_t>(response.token_ids().begin(), response.token_ids().end())),
            ByteIds("<|system|>s<eos><|assistant|>"));
}

TEST_F(RouterUnaryTest, DetokenizesWithOrWithoutSpecialTokens) {
  StartOne();
  v1::DetokenizeRequest request;
  for (const std::int32_t id : {int{'a'}, kEndToken, 0xE2}) request.add_token_ids(id);
  EXPECT_EQ(Detokenize(request).value(), "a\uFFFD");
  request.set_skip_special_tokens(false);
  EXPECT_EQ(Detokenize(request).value(), "a<end>\uFFFD");
  request.add_token_ids(299);  // the model's padding
  EXPECT_EQ(Detokenize(request).value(), "a<end>\uFFFD");
}

TEST_F(RouterUnaryTest, BadRequestsAreRefusedByName) {
  context_.limits.max_prompt_bytes = 4;
  context_.limits.max_detokenize_tokens = 2;
  StartOne();
  v1::TokenizeRequest text;
  EXPECT_THAT(std::string(Tokenize(text).status().message()), HasSubstr("set text or chat"));
  text.set_text("");
  EXPECT_THAT(std::string(Tokenize(text).status().message()), HasSubstr("empty"));
  text.set_text("abcd");
  EXPECT_TRUE(Tokenize(text).ok());
  text.set_text("abcde");
  EXPECT_THAT(std::string(Tokenize(text).status().message()), HasSubstr("at most 4"));
  v1::DetokenizeRequest ids;
  EXPECT_EQ(Detokenize(ids).value(), "");
  ids.mutable_token_ids()->Add(300);
  EXPECT_THAT(std::string(Detokenize(ids).status().message()), HasSubstr("token_ids[0] is 300"));
  ids.set_token_ids(0, -1);
  EXPECT_THAT(std::string(Detokenize(ids).status().message()), HasSubstr("token_ids[0] is -1"));
  ids.mutable_token_ids()->Resize(3, 'a');
  ids.set_token_ids(0, 'a');
  EXPECT_THAT(std::string(Detokenize(ids).status().message()), HasSubstr("at most 2"));
}

TEST_F(RouterUnaryTest, ModelInfoIsThatOfTheReadyGroups) {
  worker_addresses_ = {UniqueAddress("a"), UniqueAddress("b")};
  v1::GroupState state = FakeWorker::ReadyState();
  state.mutable_group()->set_max_model_len(128);
  workers_.push_back(std::make_unique<FakeWorker>(worker_addresses_[0], state));
  StartRouter(worker_addresses_);
  WaitUntilReady(0);
  context_.limits.max_logprobs = 7;
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(stub_->GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.model(), "tiny");
  EXPECT_EQ(info.max_model_len(), 128);
  EXPECT_EQ(info.vocab_size(), 300);
  EXPECT_THAT(info.eos_token_ids(), ElementsAre(0));
  EXPECT_TRUE(info.text());
  EXPECT_FALSE(info.chat());
  EXPECT_EQ(info.max_logprobs(), 7);
}

TEST_F(RouterUnaryTest, ModelInfoWithoutAReadyGroupIsNotReady) {
  StartRouter({UniqueAddress("nobody")});
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  const absl::Status status = FromGrpcStatus(stub_->GetModelInfo(&context, {}, &info));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(ReasonOf(status), kReasonNotReady);
  EXPECT_TRUE(RetryAfterOf(status).has_value());
}

TEST_F(RouterUnaryTest, BytesThatDoNotParseAreInvalidArgumentsOfEveryMethod) {
  StartOne();
  for (const char* method :
       {"Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetServerInfo"}) {
    const absl::Status status = SendBytes(method, "\x0a\xff\xff\xff\xff\xff");
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << method << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(method) + "Request"));
  }
  for (const char* method : {"Generate", "Abort", "Tokenize"}) {  // field 1, or 3, not UTF-8
    const std::string key = std::string(method) == "Generate" ? "\x1a" : "\x0a";
    const absl::Status status = SendBytes(method, key + "\x02\xff\xfe");
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << method << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("UTF-8"));
  }
  // Fields of a later version are left alone.
  EXPECT_TRUE(SendBytes("GetModelInfo", "\xf8\x7f\x05").ok());
}

}  // namespace
}  // namespace weft
