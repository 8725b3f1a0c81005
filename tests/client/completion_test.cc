#include "client/completion.h"

#include "gtest/gtest.h"

namespace weft {
namespace {

v1::GenerateResponse Response(std::initializer_list<std::int32_t> ids, std::string text) {
  v1::GenerateResponse response;
  response.mutable_token_ids()->Add(ids.begin(), ids.end());
  response.set_text(std::move(text));
  return response;
}

TEST(CompletionTest, JsonHasTheFieldsInOrderAndWholeText) {
  Completion completion;
  v1::GenerateResponse first = Response({5}, "a\"");
  first.add_prompt_token_ids(1);
  first.add_prompt_token_ids(2);
  first.mutable_usage()->set_prompt_tokens(2);
  first.mutable_usage()->set_completion_tokens(1);
  completion.Append(first);
  v1::GenerateResponse last = Response({6, 7}, "é\n");
  last.set_finish_reason(v1::FINISH_REASON_LENGTH);
  last.mutable_usage()->set_prompt_tokens(2);
  last.mutable_usage()->set_completion_tokens(3);
  completion.Append(last);
  EXPECT_EQ(CompletionToJson(4, completion),
            R"({"index":4,"prompt_token_ids":[1,2],"token_ids":[5,6,7],"text":"a\"é\n",)"
            R"("finish_reason":"length",)"
            R"("usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}})");
}

TEST(CompletionTest, JsonOfAnErrorHasCodeReasonAndMessage) {
  Completion completion;
  completion.Append(Response({5}, "a"));
  completion.status = absl::UnavailableError("gone");
  completion.error_reason = "RANK_LOST";
  EXPECT_EQ(CompletionToJson(0, completion),
            R"({"index":0,"error":{"code":"UNAVAILABLE","reason":"RANK_LOST","message":"gone"}})");
}

}  // namespace
}  // namespace weft
