#include "worker/model/checkpoint_check.h"

#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
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

  absl::Status CheckEnds() {
    const Dim vocab{c_.vocab_size, "vocab_size"};
    RETURN_IF_ERROR(Need("model.embed_tokens.weight", {vocab, hidden_}, c_.architecture));
    RETURN_IF_ERROR(Need("model.norm.weight", {hidden_}, c_.architecture));
    if (c_.tie_word_embeddings) return absl::OkStatus();
    return Need("lm_head.weight", {vocab, hidden_}, "tie_word_embeddings is false");
  }

  absl::Status CheckLayer(std::int32_t layer) {
    prefix_ = fmt::format("model.layers.{}.", layer);
    layers_ = fmt::format("num_hidden_layers is {}", c_.num_layers);
    RETURN_IF_ERROR(Need(prefix_ + "input_layernorm.weight", {hidden_}, layers_));
    RETURN_IF_ERROR(c_.mla.has_value() ? CheckMla() : CheckGqa());
    RETURN_IF_ERROR(Need(prefix_ + "post_attention_layernorm.weight", {hidden_}, layers_));
    if (c_.HasExperts(layer)) return CheckExperts();
    return CheckMlp("mlp", {c_.intermediate_size, "intermediate_size"});
  }

  // Weights and biases of the layers that no check asked for: the answer without them would be
  // another model's. What is beyond the last layer is not run.
  absl::Status CheckNothingIsLeftOut() const {
    for (std::string_view name : checkpoint_.Names()) {
      if (!IsOfALayer(name) || needed_.contains(std::string(name))) continue;
      if (!name.ends_with(".weight") && !name.ends_with("bias")) continue;
      return absl::InvalidArgumentError(
          fmt::format("tensor {} is in the checkpoint, but no part of {} with this config.json: "
                      "they are of different models",
                      name, c_.architecture));
    }
    return absl::OkStatus();
  }

 private:
  // `reason`: the key that makes the tensor necessary.
  absl::Status Need(const std::string& name, std::initializer_list<Dim> dims,
                    std::string_view reason) {
    std::vector<std::int64_t> shape;
    std::string keys;
    for (const Dim& dim : dims) {
      shape.push_back(dim.size);
      keys += fmt::format("{}{}", keys.empty() ? "" : ", ", dim.keys);
    }
    needed_.insert(name);
    const absl::Status status = checkpoint_.Find(name, shape).status();
    if (status.ok()) return status;
    const std::string because = absl::IsNotFound(status)
                                    ? fmt::format("config.json needs it: {}", reason)
                                    : fmt::format("by config.json its shape is [{}]", keys);
    return absl::Status(status.code(),
                        fmt::format("{}; {}", std::string(status.message()), because));
  }

  // A linear layer; `bias_reason` is empty when it has no bias.
  absl::Status NeedLinear(const std::string& name, Dim out, Dim in, std::string_view bias_reason) {
    RETURN_IF_ERROR(Need(prefix_ + name + ".weight", {out, in}, layers_));
    if (bias_reason.empty()) return absl::OkStatus();
    return Need(prefix_ + name + ".bias", {out}, bias_reason);
  }

  absl::Status CheckGqa() {
    const Dim head_dim{c_.head_dim, "head_dim"};
    const Dim q{std::int64_t{c_.num_q_heads} * c_.head_dim, "num_attention_heads * head_dim"};
    const Dim kv{std::int64_t{c_.num_kv_heads} * c_.head_dim, "num_key_value_heads * head_dim"};
    const std::string_view o_bias = c_.o_bias ? "attention_bias is true" : "";
    const std::string_view qkv_bias = c_.qkv_bias && !c_.o_bias ? c_.architecture : o_bias;
    RETURN_IF_ERROR(NeedLinear("self_attn.q_proj", q, hidden_, qkv_bias));
    RETURN_IF_ERROR(NeedLinear("self_attn.k_proj", kv, hidden_, qkv_bias));
    RETURN_IF_ERROR(NeedLinear("self_attn.v_proj", kv, hidden_, qkv_bias));
    RETURN_IF_ERROR(NeedLinear("self_attn.o_proj", hidden_, q, o_bias));
    if (!c_.qk_norm) return absl::OkStatus();
    for (const char* name : {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}) {
      RETURN_IF_ERROR(Need(prefix_ + name, {head_dim}, c_.architecture));
    }
    return absl::OkStatus();
  }

  absl::Status CheckMla() {
    const MlaConfig& mla = *c_.mla;
    const std::int64_t heads = c_.num_q_heads;
    const Dim q{heads * mla.qk_head_dim(),
                "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"};
    const Dim q_rank{mla.q_lora_rank, "q_lora_rank"};
    const Dim kv_rank{mla.kv_lora_rank, "kv_lora_rank"};
    const Dim latent{c_.head_dim, "kv_lora_rank + qk_rope_head_dim"};
    const Dim kv{heads * (mla.qk_nope_head_dim + mla.v_head_dim),
                 "num_attention_heads * (qk_nope_head_dim + v_head_dim)"};
    const Dim o{heads * mla.v_head_dim, "num_attention_heads * v_head_dim"};
    const std::string_view bias = c_.o_bias ? "attention_bias is true" : "";
    if (mla.q_lora_rank > 0) {
      RETURN_IF_ERROR(NeedLinear("self_attn.q_a_proj", q_rank, hidden_, bias));
      RETURN_IF_ERROR(Need(prefix_ + "self_attn.q_a_layernorm.weight", {q_rank}, layers_));
      RETURN_IF_ERROR(NeedLinear("self_attn.q_b_proj", q, q_rank, ""));
    } else {
      RETURN_IF_ERROR(NeedLinear("self_attn.q_proj", q, hidden_, ""));
    }
    RETURN_IF_ERROR(NeedLinear("self_attn.kv_a_proj_with_mqa", latent, hidden_, bias));
    RETURN_IF_ERROR(Need(prefix_ + "self_attn.kv_a_layernorm.weight", {kv_rank}, layers_));
    RETURN_IF_ERROR(NeedLinear("self_attn.kv_b_proj", kv, kv_rank, ""));
    return NeedLinear("self_attn.o_proj", hidden_, o, bias);
  }

  absl::Status CheckMlp(const std::string& name, Dim width) {
    const std::string_view bias = c_.mlp_bias ? "mlp_bias is true" : "";
    RETURN_IF_ERROR(NeedLinear(name + ".gate_proj", width, hidden_, bias));
    RETURN_IF_ERROR(NeedLinear(name + ".up_proj", width, hidden_, bias));
    return NeedLinear(name + ".down_proj", hidden_, width, bias);
  }

  absl::Status CheckExperts() {
    const MoeConfig& moe = *c_.moe;
    const Dim experts{moe.num_experts, "the number of experts"};
    const Dim width{moe.intermediate_size, "an expert's width"};
    const std::string block(moe.block);
    RETURN_IF_ERROR(NeedLinear(block + ".gate", experts, hidden_, ""));
    if (moe.score_bias) {
      RETURN_IF_ERROR(
          Need(prefix_ + block + ".gate.e_score_correction_bias", {experts}, c_.architecture));
    }
    for (std::int32_t e = 0; e < moe.num_experts; ++e) {
      const std::string expert = fmt::format("{}.experts.{}.", block, e);
      RETURN_IF_ERROR(NeedLinear(fmt::format("{}{}", expert, moe.gate), width, hidden_, ""));
      RETURN_IF_ERROR(NeedLinear(fmt::format("{}{}", expert, moe.up), width, hidden_, ""));
      RETURN_IF_ERROR(NeedLinear(fmt::format("{}{}", expert, moe.down), hidden_, width, ""));
    }
    if (moe.shared_intermediate_size == 0) return absl::OkStatus();
    return CheckMlp(block + ".shared_experts",
                    {moe.shared_intermediate_size, "n_shared_experts * moe_intermediate_size"});
  }

  bool IsOfALayer(std::string_view name) const {
    constexpr std::string_view kLayers = "model.layers.";
    if (!name.starts_with(kLayers)) return false;
    std::int64_t layer = 0;
    for (char c : name.substr(kLayers.size())) {
      if (c < '0' || c > '9' || layer >= c_.num_layers) break;
      layer = layer * 10 + (c - '0');
    }
    return layer < c_.num_layers;
  }

  const ModelConfig& c_;
  const Checkpoint& checkpoint_;
  const Dim hidden_{c_.hidden_size, "hidden_size"};
  std::string prefix_;  // of the layer in hand
  std::string layers_;
  std::unordered_set<std::string> needed_;
};

}  // namespace

absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  Checker checker(config, checkpoint);
  RETURN_IF_ERROR(checker.CheckEnds());
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    RETURN_IF_ERROR(checker.CheckLayer(layer));
  }
  return checker.CheckNothingIsLeftOut();
}

}  // namespace weft
