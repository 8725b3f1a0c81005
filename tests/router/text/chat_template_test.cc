#include "router/text/chat_template.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/text/tokenizer.h"
#include "tests/golden.h"
#include "tests/temp_dir.h"

namespace weft {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class ChatTemplateTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_.path() / name, std::ios::binary) << text;
  }
  absl::StatusOr<std::string> Render(const std::vector<ChatTurn>& turns) {
    const auto loaded = ChatTemplate::Load(dir_.path());
    if (!loaded.ok()) return loaded.status();
    return (*loaded)->Render(turns);
  }

  const TempDir dir_;
};

// The golden's chats, as Hugging Face renders them; where its tokenizer was fetched, their ids.
TEST_F(ChatTemplateTest, RendersWhatHuggingFaceRenders) {
  WEFT_GOLDEN_OR_SKIP(folder, "chat");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++files;
    std::ifstream stream(entry.path());
    const json golden = json::parse(stream);
    json config = golden["variables"];
    config["chat_template"] = golden["chat_template"];
    Write("tokenizer_config.json", config.dump());
    const auto loaded = ChatTemplate::Load(dir_.path());
    ASSERT_TRUE(loaded.ok()) << entry.path() << loaded.status();
    const std::string name = golden["tokenizer"];
    const std::string fetched = name == "smollm2"
                                    ? WEFT_SOURCE_DIR "/models/smollm2-135m-instruct/tokenizer.json"
                                    : WEFT_SOURCE_DIR "/models/tokenizers/" + name + ".json";
    const auto tokenizer = Tokenizer::Load(fetched);
    for (const json& rendering : golden["renderings"]) {
      std::vector<std::string> texts;
      std::vector<ChatTurn> turns;
      for (const json& message : rendering["messages"]) {
        turns.push_back({.role = message["role"].get_ref<const std::string&>(),
                         .content = message["content"].get_ref<const std::string&>()});
      }
      const auto text = (*loaded)->Render(turns, rendering["add_generation_prompt"].get<bool>());
      ASSERT_TRUE(text.ok()) << text.status();
      EXPECT_EQ(*text, rendering["text"].get<std::string>()) << name << rendering["name"];
      if (!tokenizer.ok()) continue;
      EXPECT_EQ((*tokenizer)->Encode(*text, false).value(),
                rendering["ids"].get<std::vector<std::int32_t>>())
          << name << rendering["name"];
    }
  }
  EXPECT_GE(files, 3);
}

TEST_F(ChatTemplateTest, TheTinyCheckpointsHaveOne) {
  const auto loaded = ChatTemplate::Load(WEFT_SOURCE_DIR "/tests/data/llama_gqa");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->Render({{"user", "a"}, {"assistant", "b"}}).value(),
            "<|user|>a<eos><|assistant|>b<eos><|assistant|>");
}

TEST_F(ChatTemplateTest, IsFoundInEitherFileAndTheOwnFileWins) {
  EXPECT_TRUE(absl::IsNotFound(Render({}).status()));
  Write("tokenizer_config.json", R"({"eos_token": {"content": "</s>"}})");
  EXPECT_TRUE(absl::IsNotFound(Render({}).status()));
  Write(
      "tokenizer_config.json",
      R"({"bos_token": null, "eos_token": {"content": "</s>"}, "chat_template": "config{{ eos_token }}"})");
  EXPECT_EQ(Render({}).value(), "config</s>");
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "t"},
                                                       {"name": "default", "template": "d"}]})");
  EXPECT_EQ(Render({}).value(), "d");
  Write("chat_template.jinja", "own\n");
  EXPECT_EQ(Render({}).value(), "own");
}

TEST_F(ChatTemplateTest, WhatIsWrongIsNamed) {
  const auto message = [this] { return std::string(Render({{"user", "a"}}).status().message()); };
  Write("tokenizer_config.json", "{");
  EXPECT_THAT(message(), HasSubstr("tokenizer_config.json"));
  Write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_THAT(message(), HasSubstr("chat_template"));
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "x", "template": "t"}]})");
  EXPECT_THAT(message(), HasSubstr("default"));
  Write("tokenizer_config.json", R"({"chat_template": "{% macro x() %}"})");
  EXPECT_THAT(message(), HasSubstr("line 1: 'macro' is not supported"));
  Write("chat_template.jinja", "{{ raise_exception('no ' + messages[0].role) }}");
  EXPECT_THAT(message(), HasSubstr("chat_template.jinja: line 1: no user"));
}

}  // namespace
}  // namespace weft
