#pragma once

#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "gtest/gtest.h"
#include "router/text/byte_level.h"
#include "router/text/tokenizer.h"

namespace weft {

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline nlohmann::json ReadJson(const std::string& path) {
  return nlohmann::json::parse(ReadFile(path));
}

// Twelve random tokenizers and what the reference library says; see data/.
inline nlohmann::json ReadFeatures() {
  return ReadJson(WEFT_SOURCE_DIR "/tests/router/text/data/tokenizer_features.json")["variants"];
}

// A tokenizer.json with the 256 bytes as ids 0..255, a few merges, and two added tokens, 259
// (special) and 260.
inline nlohmann::json SmallTokenizer() {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[ByteLevelSpelling(byte)] = byte;
  vocab["th"] = 256;
  vocab["the"] = 257;
  vocab["\u0120the"] = 258;
  const auto added = [](int id, const char* content, bool special) {
    return nlohmann::json{{"id", id},          {"content", content}, {"single_word", false},
                          {"lstrip", false},   {"rstrip", false},    {"normalized", false},
                          {"special", special}};
  };
  return {
      {"added_tokens", {added(259, "<end>", true), added(260, "<tool>", false)}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e", "\u0120 the"}}}}};
}

inline std::unique_ptr<Tokenizer> MustParse(const nlohmann::json& config) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Parse(config.dump(), "test");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

}  // namespace weft
