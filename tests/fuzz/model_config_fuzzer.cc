#include <cstddef>
#include <cstdint>
#include <fstream>

#include "server/base/check.h"
#include "tests/temp_dir.h"
#include "worker/model/model_config.h"

// A config that is accepted has what the model's code relies on.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const weft::TempDir dir;
  std::ofstream(dir.path() / "config.json", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  const auto config = weft::LoadModelConfig(dir.path());
  if (!config.ok()) return 0;
  CHECK(config->num_layers > 0 && config->hidden_size > 0 && config->intermediate_size > 0);
  CHECK(config->num_q_heads > 0 && config->num_kv_heads > 0 && config->vocab_size > 0);
  CHECK(config->num_q_heads % config->num_kv_heads == 0);
  CHECK(config->head_dim > 0 && config->head_dim % 8 == 0);
  CHECK(0 < config->value_dim && config->value_dim <= config->head_dim);
  CHECK(0 < config->rotary_dim && config->rotary_dim <= config->head_dim);
  CHECK(config->rotary_dim % 2 == 0 && config->attention_scale > 0);
  CHECK(config->mla.has_value() || config->value_dim == config->head_dim);
  if (config->moe.has_value()) {
    const weft::MoeConfig& moe = *config->moe;
    CHECK(moe.layers.size() == static_cast<std::size_t>(config->num_layers));
    CHECK(0 < moe.num_groups && moe.num_groups <= weft::kernels::kMaxExpertGroups);
    CHECK(moe.num_experts % moe.num_groups == 0);
    CHECK(0 < moe.groups_per_token && moe.groups_per_token <= moe.num_groups);
    const bool grouped = moe.group_score != weft::kernels::GroupScore::kNone;
    CHECK(0 < moe.experts_per_token);
    CHECK(moe.experts_per_token <=
          moe.num_experts / moe.num_groups * (grouped ? moe.groups_per_token : moe.num_groups));
    CHECK(moe.intermediate_size > 0 && moe.shared_intermediate_size >= 0);
  }
  CHECK(config->max_position_embeddings > 0 && config->rms_norm_eps > 0);
  for (std::int32_t id : config->eos_token_ids) CHECK(0 <= id && id < config->vocab_size);
  const weft::RopeFrequencies rope = weft::ComputeRopeFrequencies(config->rope, config->rotary_dim);
  CHECK(rope.inv_freq.size() == static_cast<std::size_t>(config->rotary_dim / 2));
  for (float inv_freq : rope.inv_freq) CHECK(inv_freq >= 0);  // false for NaN
  CHECK(rope.attention_scaling > 0);
  return 0;
}
