#include "client/prompts_file.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PromptsFileTest, FieldsOfALineOverrideTheDefaults) {
  v1::SamplingParams defaults;
  defaults.set_max_tokens(5);
  defaults.set_seed(1);
  defaults.add_stop_token_ids(9);
  const auto requests = ParsePromptsFile(
      "{\"prompt\": \"h\\u00e9\"}\n"
      "\n"
      "{\"prompt_token_ids\": [1, 2], \"max_tokens\": 7, \"temperature\": 0, \"top_k\": -1, "
      "\"top_p\": 0.5, \"seed\": 18446744073709551615, \"ignore_eos\": true, "
      "\"stop_token_ids\": []}\r\n"
      "{\"prompt\": \"last\", \"prompt_token_ids\": null, \"temperature\": null}",
      "f", defaults);
  ASSERT_TRUE(requests.ok()) << requests.status();
  ASSERT_EQ(requests->size(), 3U);
  EXPECT_EQ((*requests)[0].text(), "hé");
  EXPECT_EQ((*requests)[0].sampling().SerializeAsString(), defaults.SerializeAsString());

  EXPECT_THAT((*requests)[1].token_ids().ids(), ElementsAre(1, 2));
  const v1::SamplingParams& sampling = (*requests)[1].sampling();
  EXPECT_EQ(sampling.max_tokens(), 7);
  EXPECT_TRUE(sampling.has_temperature());
  EXPECT_EQ(sampling.temperature(), 0);
  EXPECT_EQ(sampling.top_k(), -1);
  EXPECT_EQ(sampling.top_p(), 0.5F);
  EXPECT_EQ(sampling.seed(), 18446744073709551615U);
  EXPECT_TRUE(sampling.ignore_eos());
  EXPECT_TRUE(sampling.stop_token_ids().empty());

  EXPECT_EQ((*requests)[2].text(), "last");
  EXPECT_FALSE((*requests)[2].sampling().has_temperature());
}

TEST(PromptsFileTest, EveryFieldOfSamplingIsRead) {
  const auto requests = ParsePromptsFile(
      R"({"prompt": "x", "cache_salt": "s", "max_tokens": 1, "temperature": 0.5, "top_p": 0.25,)"
      R"( "top_k": 2, "seed": 3, "stop_token_ids": [4], "ignore_eos": false, "min_p": 0.75,)"
      R"( "presence_penalty": -1, "frequency_penalty": 1.5, "repetition_penalty": 2,)"
      R"( "min_tokens": 5, "logit_bias": {"6": -100, "7": 0.5}, "allowed_token_ids": [8, 9],)"
      R"( "bad_words_token_ids": [[10, 11], [12]], "logprobs": 0, "prompt_logprobs": 13, "n": 1,)"
      R"( "stop": ["a", "b"], "include_stop_str_in_output": true, "skip_special_tokens": false,)"
      R"( "bad_words": ["c"]})",
      "f", {});
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_EQ(requests->front().cache_salt(), "s");
  const v1::SamplingParams& sampling = requests->front().sampling();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  sampling.GetReflection()->ListFields(sampling, &set);
  EXPECT_EQ(static_cast<int>(set.size()), v1::SamplingParams::descriptor()->field_count());
  EXPECT_EQ(sampling.min_p(), 0.75F);
  EXPECT_EQ(sampling.logit_bias().at(6), -100);
  EXPECT_EQ(sampling.logit_bias().at(7), 0.5F);
  EXPECT_THAT(sampling.allowed_token_ids(), ElementsAre(8, 9));
  ASSERT_EQ(sampling.bad_words_token_ids_size(), 2);
  EXPECT_THAT(sampling.bad_words_token_ids(0).ids(), ElementsAre(10, 11));
  EXPECT_THAT(sampling.stop(), ElementsAre("a", "b"));
  EXPECT_FALSE(sampling.skip_special_tokens());
  EXPECT_THAT(sampling.bad_words(), ElementsAre("c"));
}

TEST(PromptsFileTest, AMalformedLineIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"prompt\": \"x\"", "not JSON: parse error at line 1, column 15"},
      {"[1]", "not a JSON object"},
      {"x", "not JSON"},
      {"{\"prompt\": \"\xff\"}", "not JSON"},
      {"{\"prompt\": " + std::string(100000, '[') + std::string(100000, ']') + "}",
       "nests deeper than 64"},
      {"{\"max_tokens\": 1}", "exactly one of"},
      {"{\"prompt\": \"x\", \"prompt_token_ids\": [1]}", "exactly one of"},
      {"{\"prompt\": \"x\", \"seed\": 1, \"seed\": 1}", "`seed` is there twice"},
      {"{\"prompt\": 5}", "`prompt` is 5; a string"},
      {"{\"prompt_token_ids\": \"1,2\"}", "a list of token ids"},
      {"{\"prompt_token_ids\": [1, 2.5]}", "a list of token ids"},
      {"{\"prompt_token_ids\": [2147483648]}", "a list of token ids"},
      {"{\"prompt\": \"x\", \"max_tokens\": 1.5}", "`max_tokens` is 1.5; an integer"},
      {"{\"prompt\": \"x\", \"max_tokens\": 2147483648}", "`max_tokens` is 2147483648; an integer"},
      {"{\"prompt\": \"x\", \"max_tokens\": -2147483649}", "an integer"},
      {"{\"prompt\": \"x\", \"temperature\": \"hot\"}", "`temperature` is \"hot\"; a number"},
      {"{\"prompt\": \"x\", \"seed\": -1}", "`seed` is -1;"},
      {"{\"prompt\": \"x\", \"ignore_eos\": 1}", "`ignore_eos` is 1; true or false"},
      {"{\"prompt\": \"x\", \"max_token\": 1}", "`max_token` is unknown"},
      {"{\"prompt\": \"x\", \"n\": 2}", "`n` is 2;"},
      {"{\"prompt\": \"x\", \"stop\": \"a\"}", "`stop` is \"a\"; a list of strings"},
      {"{\"prompt\": \"x\", \"stop\": [1]}", "a list of strings"},
      {"{\"prompt\": \"x\", \"logit_bias\": [1]}", "an object from token ids to numbers"},
      {"{\"prompt\": \"x\", \"logit_bias\": {\"a\": 1}}", "an object from token ids"},
      {"{\"prompt\": \"x\", \"logit_bias\": {\"1\": \"a\"}}", "an object from token ids"},
      {"{\"prompt\": \"x\", \"bad_words_token_ids\": [1]}", "`bad_words_token_ids` is 1;"},
      {"{\"prompt\": \"x\", \"bad_words_token_ids\": 1}", "a list of lists"},
      {"{\"prompt\": \"x\", \"cache_salt\": 1}", "`cache_salt` is 1; a string"},
  };
  for (const auto& [line, message] : cases) {
    const auto requests =
        ParsePromptsFile("{\"prompt\": \"good\"}\n" + line + "\n", "my.jsonl", {});
    ASSERT_TRUE(absl::IsInvalidArgument(requests.status())) << line;
    EXPECT_THAT(std::string(requests.status().message()), HasSubstr("my.jsonl:2: ")) << line;
    EXPECT_THAT(std::string(requests.status().message()), HasSubstr(message)) << line;
  }
}

TEST(PromptsFileTest, TokenIdListsAreIntegersWithCommas) {
  EXPECT_THAT(*ParseTokenIds("1"), ElementsAre(1));
  EXPECT_THAT(*ParseTokenIds("1, 22 ,-3"), ElementsAre(1, 22, -3));
  for (const char* bad : {"", ",", "1,", "1,,2", "x", "1.5", "1 2", "2147483648"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseTokenIds(bad).status())) << bad;
  }
}

}  // namespace
}  // namespace weft
