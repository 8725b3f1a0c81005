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
  CHECK(config->head_dim > 0 && config->head_dim % 2 == 0);
  CHECK(config->max_position_embeddings > 0 && config->rms_norm_eps > 0);
  for (std::int32_t id : config->eos_token_ids) CHECK(0 <= id && id < config->vocab_size);
  if (config->head_dim > 4096) return 0;
  const weft::RopeFrequencies rope = weft::ComputeRopeFrequencies(config->rope, config->head_dim);
  CHECK(rope.inv_freq.size() == static_cast<std::size_t>(config->head_dim / 2));
  for (float inv_freq : rope.inv_freq) CHECK(inv_freq >= 0);  // false for NaN
  CHECK(rope.attention_scaling > 0);
  return 0;
}
