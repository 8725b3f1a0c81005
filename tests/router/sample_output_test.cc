#include "router/sample_output.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/byte_tokenizer.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class SampleOutputTest : public ::testing::Test {
 protected:
  SampleOutput& Make() {
    output_.emplace(tokenizer_.get(), sampling_, /*index=*/2, /*prompt_tokens=*/3);
    return *output_;
  }
  // A message of the leader with one logprob for each token.
  static v1::WorkerGenerateResponse Response(
      std::string_view text, v1::FinishReason finish = v1::FINISH_REASON_UNSPECIFIED) {
    v1::WorkerGenerateResponse response;
    for (const std::int32_t id : ByteIds(text)) {
      response.add_token_ids(id);
      response.add_logprobs()->mutable_token()->set_token_id(id);
    }
    response.set_finish_reason(finish);
    return response;
  }
  v1::GenerateResponse Read(v1::WorkerGenerateResponse response) {
    v1::GenerateResponse message;
    EXPECT_TRUE(output_->Read(response, message));
    EXPECT_EQ(message.index(), 2);
    EXPECT_EQ(message.logprobs_size(), message.token_ids_size());
    return message;
  }

  const std::unique_ptr<Tokenizer> tokenizer_ = ByteTokenizer();
  v1::SamplingParams sampling_;
  std::optional<SampleOutput> output_;
};

// However the leader's messages cut the tokens, tokens, logprobs and usage end with the token that
// completes the stop string, and the text before it.
TEST_F(SampleOutputTest, NothingBehindAStopStringIsSentAtEverySplitPoint) {
  sampling_.add_stop("STOP");
  const std::string all = "ab STOP and more";
  for (std::size_t cut = 0; cut <= all.size(); ++cut) {
    SampleOutput& output = Make();
    std::string text;
    std::vector<std::int32_t> ids;
    v1::GenerateResponse last;
    for (const std::string& part : {all.substr(0, cut), all.substr(cut)}) {
      v1::WorkerGenerateResponse response = Response(part);
      v1::GenerateResponse message;
      if (!output.Read(response, message)) continue;
      EXPECT_EQ(message.logprobs_size(), message.token_ids_size());
      text += message.text();
      ids.insert(ids.end(), message.token_ids().begin(), message.token_ids().end());
      last = message;
    }
    EXPECT_EQ(text, "ab ") << cut;
    EXPECT_EQ(ids, ByteIds("ab STOP")) << cut;
    EXPECT_EQ(last.usage().completion_tokens(), 7) << cut;
    EXPECT_EQ(last.finish_reason(), v1::FINISH_REASON_STOP);
    EXPECT_EQ(last.stop(), "STOP");
    EXPECT_TRUE(output.finished());
  }
}

TEST_F(SampleOutputTest, NothingFollowsAFinish) {
  Make();
  Read(Response("a", v1::FINISH_REASON_LENGTH));
  v1::WorkerGenerateResponse response = Response("b");
  v1::GenerateResponse message;
  EXPECT_FALSE(output_->Read(response, message));
}

TEST_F(SampleOutputTest, AStopTokenIsATokenWithoutText) {
  for (const bool include : {false, true}) {
    for (const bool eos : {false, true}) {
      sampling_.set_include_stop_str_in_output(include);
      Make();
      v1::WorkerGenerateResponse response = Response("abZ", v1::FINISH_REASON_STOP);
      response.set_ended_by_eos(eos);
      const v1::GenerateResponse message = Read(response);
      EXPECT_EQ(message.text(), include ? "abZ" : "ab");
      EXPECT_THAT(message.token_ids(), ElementsAre('a', 'b', 'Z'));
      EXPECT_EQ(message.usage().completion_tokens(), 3);
      EXPECT_EQ(message.eos_token_id(), eos ? 'Z' : 0);
      EXPECT_EQ(message.stop_token_id(), eos ? 0 : 'Z');
    }
  }
}

TEST_F(SampleOutputTest, HeldTextIsFlushedWhateverTheEnd) {
  sampling_.add_stop("STOP");
  Make();
  EXPECT_EQ(Read(Response("aST")).text(), "a");
  EXPECT_EQ(Read(Response("", v1::FINISH_REASON_LENGTH)).text(), "ST");
  Make();
  EXPECT_EQ(Read(Response("aSTO", v1::FINISH_REASON_LENGTH)).text(), "aSTO");
  Make();
  EXPECT_EQ(Read(Response("aSTZ", v1::FINISH_REASON_STOP)).text(), "aST");
  Make();
  Read(Response("aST"));
  v1::GenerateResponse message;
  output_->Abort(message);
  EXPECT_EQ(message.text(), "ST");
  EXPECT_EQ(message.finish_reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_EQ(message.usage().completion_tokens(), 3);
  EXPECT_EQ(message.index(), 2);
}

TEST_F(SampleOutputTest, LogprobsOfThePromptWaitForTheFirstToken) {
  Make();
  v1::WorkerGenerateResponse chunk;
  for (int i = 0; i < 2; ++i) {
    chunk.clear_prompt_logprobs();
    chunk.add_prompt_logprobs()->mutable_token()->set_token_id(i);
    v1::GenerateResponse message;
    EXPECT_FALSE(output_->Read(chunk, message));
  }
  v1::GenerateResponse first = Read(Response("a"));
  ASSERT_EQ(first.prompt_logprobs_size(), 2);
  EXPECT_EQ(first.prompt_logprobs(1).token().token_id(), 1);
  EXPECT_THAT(Read(Response("b")).prompt_logprobs(), IsEmpty());
}

TEST_F(SampleOutputTest, UsageIsInEveryMessage) {
  Make();
  v1::WorkerGenerateResponse response = Response("ab");
  response.set_cached_tokens(2);
  v1::GenerateResponse message = Read(response);
  EXPECT_EQ(message.usage().prompt_tokens(), 3);
  EXPECT_EQ(message.usage().completion_tokens(), 2);
  EXPECT_EQ(message.usage().cached_tokens(), 2);
  message = Read(Response("c", v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(message.usage().completion_tokens(), 3);
  EXPECT_EQ(message.usage().cached_tokens(), 2);
}

TEST_F(SampleOutputTest, ResumedTokensCountButTheirTextIsNotSentAgain) {
  sampling_.add_stop("STOP");
  const std::string all = "ab STOP";
  for (std::size_t cut = 0; cut < all.size(); ++cut) {
    Make();  // the text that a first router sent
    std::string before;
    if (cut > 0) before = Read(Response(all.substr(0, cut))).text();
    Make();
    v1::GenerateResponse message;
    EXPECT_FALSE(output_->Resume(ByteIds(all.substr(0, cut)), message));
    message = Read(Response(all.substr(cut) + "x"));
    EXPECT_EQ(before + message.text(), "ab ") << cut;
    EXPECT_EQ(message.stop(), "STOP");
    EXPECT_EQ(message.usage().completion_tokens(), 7);
    EXPECT_EQ(message.token_ids_size(), static_cast<int>(all.size() - cut));
  }
}

TEST_F(SampleOutputTest, ResumedTokensThatHoldAStopStringEndIt) {
  sampling_.add_stop("STOP");
  Make();
  v1::GenerateResponse message;
  EXPECT_TRUE(output_->Resume(ByteIds("aSTOP"), message));
  EXPECT_EQ(message.stop(), "STOP");
  EXPECT_EQ(message.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(message.usage().completion_tokens(), 5);
  EXPECT_THAT(message.token_ids(), IsEmpty());
  EXPECT_EQ(message.text(), "");
}

TEST_F(SampleOutputTest, WithoutATokenizerThereAreTokensOnly) {
  output_.emplace(nullptr, sampling_, 2, 3);
  const v1::GenerateResponse message = Read(Response("ab", v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(message.text(), "");
  EXPECT_EQ(message.token_ids_size(), 2);
}

}  // namespace
}  // namespace weft
