#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace weft {

// What the reference implementation did with one prompt; see tests/data/README.md.
struct GoldenPrompt {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> greedy;          // 48 tokens, end of sequence ignored
  std::vector<float> margins;                // best minus second logit at each of them
  std::optional<std::int32_t> first_eos_at;  // index in `greedy`
};

struct GoldenTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;  // row-major
};

struct Golden {
  std::map<std::string, GoldenPrompt> prompts;  // "len1", "len7", "len33", "len130"
  // "last_logits.<prompt>" [vocab], "step_logits.len7" [48, vocab], "prompt_logprobs.len33" [32]
  // (of ids[1..]), "hidden.len7" [layers + 1, 7, hidden] (embedding, then each layer's output),
  // "hidden_normed.len7" [7, hidden].
  std::map<std::string, GoldenTensor> tensors;

  // Dies, naming it, when there is none.
  const GoldenPrompt& Prompt(const std::string& name) const;
  const GoldenTensor& Tensor(const std::string& name) const;
};

// tests/data/<name>, else ../shared/goldens/<name> beside the repository, file or folder; nullopt
// when neither exists.
std::optional<std::filesystem::path> GoldenPath(std::string_view name);

// All of a safetensors file, which has F32 alone. Not by way of Checkpoint: a reference must not
// depend on what it is a reference for. Throws as LoadGolden() does.
std::map<std::string, GoldenTensor> ReadGoldenTensors(const std::filesystem::path& path);

// Reads <dir>/golden.json and <dir>/golden.safetensors. Throws when they are malformed: a test
// shows that as its failure.
Golden LoadGolden(const std::filesystem::path& dir);

}  // namespace weft

// Declares the path `var`, or ends the test when the golden `name` is absent: skipped at a
// developer's desk, failed in CI (the environment variable CI is set).
#define WEFT_GOLDEN_OR_SKIP(var, name)                                                          \
  const std::filesystem::path var = ::weft::GoldenPath(name).value_or(std::filesystem::path()); \
  if (var.empty() && std::getenv("CI") != nullptr) {                                            \
    FAIL() << "golden " << (name) << " is missing";                                             \
  }                                                                                             \
  if (var.empty()) GTEST_SKIP() << "golden " << (name) << " is missing"
