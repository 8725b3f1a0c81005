#include "client/bench_sessions.h"

#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace weft {
namespace {

using Tokens = std::vector<std::int32_t>;

Tokens PromptOf(const v1::GenerateRequest& request) {
  return {request.token_ids().ids().begin(), request.token_ids().ids().end()};
}

AgenticLoad Load() {
  return {.prefix_len = 40,
          .session_len = 2,
          .turn_len = 5,
          .output_len = 3,
          .vocab_size = 1000,
          .seed = 5};
}

TEST(AgenticSessionTest, AllBeginAlikeAndGoOnByThemselves) {
  std::set<Tokens> turns;
  const Tokens first = PromptOf(AgenticSession(Load(), 0).NextTurn());
  for (std::int32_t index = 0; index < 20; ++index) {
    const Tokens prompt = PromptOf(AgenticSession(Load(), index).NextTurn());
    ASSERT_EQ(prompt.size(), 47u);
    EXPECT_TRUE(std::equal(first.begin(), first.begin() + 40, prompt.begin()));
    EXPECT_TRUE(turns.insert({prompt.begin() + 40, prompt.end()}).second);
    EXPECT_EQ(prompt, PromptOf(AgenticSession(Load(), index).NextTurn())) << "not the same again";
  }
}

TEST(AgenticSessionTest, ATurnBeginsWithAllThatWasSaid) {
  AgenticSession session(Load(), 3);
  Tokens said;
  for (std::int32_t turn = 0; turn < 4; ++turn) {
    const v1::GenerateRequest request = session.NextTurn();
    EXPECT_EQ(request.sampling().max_tokens(), 3);
    EXPECT_TRUE(request.sampling().ignore_eos());
    const Tokens prompt = PromptOf(request);
    ASSERT_EQ(prompt.size(), (turn == 0 ? 42 : said.size()) + 5);
    EXPECT_TRUE(std::equal(said.begin(), said.end(), prompt.begin()));
    for (const std::int32_t id : prompt) EXPECT_TRUE(id >= 0 && id < 1000);
    const Tokens answer = {turn, 8, 9};
    session.Append(answer);
    said = prompt;
    said.insert(said.end(), answer.begin(), answer.end());
  }
}

}  // namespace
}  // namespace weft
