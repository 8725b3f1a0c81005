#pragma once

#include <string>
#include <vector>

#include "tests/golden.h"

namespace weft {

// A checkpoint of every family that is served, each with the reference's tokens and logits.
inline const char* const kFamilyCheckpoints[] = {
    "llama_gqa",
    "llama_mqa",
    "llama_odd",
    "llama3_rope",
    "qwen2",
    "qwen3",
    "mistral_window",
    "mixtral",
    "qwen3_moe_norm",
    "qwen3_moe_nonorm",
    "deepseek_v2_lite",
    "deepseek_v2_group",
    "deepseek_v3",
    "deepseek_v3_noqlora",
};

// Those of them that are here: all of them in CI, where an absent one fails the test; a bare clone
// has the Llamas alone.
inline std::vector<std::string> PresentFamilyCheckpoints() {
  std::vector<std::string> present;
  for (const char* name : kFamilyCheckpoints) {
    if (GoldenPath(name).has_value()) {
      present.emplace_back(name);
    } else if (std::getenv("CI") != nullptr) {
      ADD_FAILURE() << "golden " << name << " is missing";
    } else {
      std::printf("golden %s is missing: left out\n", name);
    }
  }
  return present;
}

}  // namespace weft
