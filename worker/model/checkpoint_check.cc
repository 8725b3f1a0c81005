#include "worker/model/checkpoint_check.h"

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// A dimension and the keys of config.json that it comes from.
struct Dim {
  std::int64_t size;
  std::string_view keys;
};

class Checker {
 public:
  Checker(const ModelConfig& config, const Checkpoint& checkpoint)
      : c_(config), checkpoint_(checkpoint) {}

  // `reason`: the key that makes the tensor necessary.
  absl::Status Need(const std::string& name, std::initializer_list<Dim> dims,
                    std::string_view reason) const {
    std::vector<std::int64_t> shape;
    std::string keys;
    for (const Dim& dim : dims) {
      shape.push_back(dim.size);
      keys += fmt::format("{}{}", keys.empty() ? "" : ", ", dim.keys);
    }
    const absl::Status status = checkpoint_.Find(name, shape).status();
    if (status.ok()) return status;
    const std::string because = absl::IsNotFound(status)
                                    ? fmt::format("config.json needs it: {}", reason)
                                    : fmt::format("by config.json its shape is [{}]", keys);
    return absl::Status(status.code(),
                        fmt::format("{}; {}", std::string(status.message()), because));
  }

  absl::Status CheckLayer(std::int32_t layer) const {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const std::string layers = fmt::format("num_hidden_layers is {}", c_.num_layers);
    const Dim q{std::int64_t{c_.num_q_heads} * c_.head_dim, "num_attention_heads * head_dim"};
    const Dim kv{std::int64_t{c_.num_kv_heads} * c_.head_dim, "num_key_value_heads * head_dim"};
    const Dim intermediate{c_.intermediate_size, "intermediate_size"};

    struct Projection {
      std::string name;
      Dim out;
      Dim in;
      bool bias;
      std::string_view bias_key;
    };
    const Projection projections[] = {
        {"self_attn.q_proj", q, hidden_, c_.attention_bias, "attention_bias"},
        {"self_attn.k_proj", kv, hidden_, c_.attention_bias, "attention_bias"},
        {"self_attn.v_proj", kv, hidden_, c_.attention_bias, "attention_bias"},
        {"self_attn.o_proj", hidden_, q, c_.attention_bias, "attention_bias"},
        {"mlp.gate_proj", intermediate, hidden_, c_.mlp_bias, "mlp_bias"},
        {"mlp.up_proj", intermediate, hidden_, c_.mlp_bias, "mlp_bias"},
        {"mlp.down_proj", hidden_, intermediate, c_.mlp_bias, "mlp_bias"},
    };
    for (const Projection& p : projections) {
      RETURN_IF_ERROR(Need(prefix + p.name + ".weight", {p.out, p.in}, layers));
      if (!p.bias) continue;
      RETURN_IF_ERROR(
          Need(prefix + p.name + ".bias", {p.out}, fmt::format("{} is true", p.bias_key)));
    }
    RETURN_IF_ERROR(Need(prefix + "input_layernorm.weight", {hidden_}, layers));
    return Need(prefix + "post_attention_layernorm.weight", {hidden_}, layers);
  }

  absl::Status CheckEnds() const {
    const Dim vocab{c_.vocab_size, "vocab_size"};
    RETURN_IF_ERROR(Need("model.embed_tokens.weight", {vocab, hidden_}, c_.architecture));
    RETURN_IF_ERROR(Need("model.norm.weight", {hidden_}, c_.architecture));
    if (c_.tie_word_embeddings) return absl::OkStatus();
    return Need("lm_head.weight", {vocab, hidden_}, "tie_word_embeddings is false");
  }

 private:
  const ModelConfig& c_;
  const Checkpoint& checkpoint_;
  const Dim hidden_{c_.hidden_size, "hidden_size"};
};

}  // namespace

absl::Status CheckLlamaTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  const Checker checker(config, checkpoint);
  RETURN_IF_ERROR(checker.CheckEnds());
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    RETURN_IF_ERROR(checker.CheckLayer(layer));
  }
  return absl::OkStatus();
}

}  // namespace weft
