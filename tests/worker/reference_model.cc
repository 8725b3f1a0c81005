#include "tests/worker/reference_model.h"

#include <cmath>
#include <cstring>

#include "fmt/format.h"
#include "kernels/cpu/convert.h"
#include "server/base/check.h"
#include "worker/model/safetensors.h"

namespace weft {
namespace {

double Rounded(double value, DType dtype) {
  std::uint32_t memory = 0;
  kernels::StoreElement(&memory, 0, dtype, static_cast<float>(value));
  return kernels::LoadElement(&memory, 0, dtype);
}

void Add(const std::vector<double>& x, std::vector<double>& to) {
  for (std::size_t i = 0; i < x.size(); ++i) to[i] += x[i];
}

}  // namespace

ReferenceModel::ReferenceModel(const std::filesystem::path& dir, DType weights, DType kv)
    : config_(*LoadModelConfig(dir)),
      kv_(kv),
      rope_(ComputeRopeFrequencies(config_.rope, config_.head_dim)) {
  CHECK_MSG(!config_.qkv_bias && !config_.mlp_bias, "biases");
  const auto checkpoint = *Checkpoint::Open(dir);
  for (std::string_view name : checkpoint->Names()) {
    const bool norm = name.find("norm") != std::string_view::npos;
    std::int64_t count = norm ? config_.hidden_size : 0;
    std::vector<std::int64_t> shape = {config_.hidden_size};
    if (!norm) {
      const std::int64_t q = config_.num_q_heads * config_.head_dim;
      const std::int64_t k = config_.num_kv_heads * config_.head_dim;
      const auto has = [&](const char* part) { return name.find(part) != std::string_view::npos; };
      shape = {config_.vocab_size, config_.hidden_size};
      if (has("q_proj")) shape = {q, config_.hidden_size};
      if (has("k_proj") || has("v_proj")) shape = {k, config_.hidden_size};
      if (has("o_proj")) shape = {config_.hidden_size, q};
      if (has("gate_proj") || has("up_proj")) {
        shape = {config_.intermediate_size, config_.hidden_size};
      }
      if (has("down_proj")) shape = {config_.hidden_size, config_.intermediate_size};
      count = shape[0] * shape[1];
    }
    const auto tensor = checkpoint->Find(name, shape);
    CHECK_MSG(tensor.ok(), tensor.status().ToString());
    std::vector<float>& values = tensors_[std::string(name)];
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = kernels::LoadElement(tensor->data.data(), i, tensor->dtype);
      values.push_back(norm ? value : static_cast<float>(Rounded(value, weights)));
    }
  }
}

ReferenceModel::Vector ReferenceModel::Multiply(const std::string& name, const Vector& x) const {
  const std::vector<float>& w = tensors_.at(name);
  Vector y(w.size() / x.size());
  for (std::size_t row = 0; row < y.size(); ++row) {
    const float* in = w.data() + row * x.size();
    for (std::size_t i = 0; i < x.size(); ++i) y[row] += in[i] * x[i];
  }
  return y;
}

ReferenceModel::Vector ReferenceModel::Norm(const std::string& name, const Vector& x) const {
  double squares = 0;
  for (double value : x) squares += value * value;
  const double factor =
      1 / std::sqrt(squares / static_cast<double>(x.size()) + double{config_.rms_norm_eps});
  const std::vector<float>& weight = tensors_.at(name);
  Vector y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * factor * weight[i];
  return y;
}

void ReferenceModel::Rotate(std::int64_t position, int num_heads, Vector& x) const {
  const int half = config_.head_dim / 2;
  for (int h = 0; h < num_heads; ++h) {
    double* head = x.data() + h * config_.head_dim;
    for (int i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * rope_.inv_freq[i];
      const double c = std::cos(angle) * rope_.attention_scaling;
      const double s = std::sin(angle) * rope_.attention_scaling;
      const double a = head[i];
      const double b = head[i + half];
      head[i] = a * c - b * s;
      head[i + half] = b * c + a * s;
    }
  }
}

ReferenceModel::Vector ReferenceModel::Attend(const Vector& q, const std::vector<Vector>& k,
                                              const std::vector<Vector>& v) const {
  const int dim = config_.head_dim;
  Vector out(q.size());
  for (int h = 0; h < config_.num_q_heads; ++h) {
    const int kv_head = h / (config_.num_q_heads / config_.num_kv_heads);
    double sum = 0;
    for (std::size_t t = 0; t < k.size(); ++t) {
      double score = 0;
      for (int d = 0; d < dim; ++d) score += q[h * dim + d] * k[t][kv_head * dim + d];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (int d = 0; d < dim; ++d) out[h * dim + d] += weight * v[t][kv_head * dim + d];
    }
    for (int d = 0; d < dim; ++d) out[h * dim + d] /= sum;
  }
  return out;
}

ReferenceModel::Vector ReferenceModel::Attention(const std::string& layer, const Vector& x,
                                                 std::vector<Vector>& k,
                                                 std::vector<Vector>& v) const {
  const auto position = static_cast<std::int64_t>(k.size());
  Vector q = Multiply(layer + "self_attn.q_proj.weight", x);
  k.push_back(Multiply(layer + "self_attn.k_proj.weight", x));
  v.push_back(Multiply(layer + "self_attn.v_proj.weight", x));
  Rotate(position, config_.num_q_heads, q);
  Rotate(position, config_.num_kv_heads, k.back());
  for (double& value : k.back()) value = Rounded(value, kv_);
  for (double& value : v.back()) value = Rounded(value, kv_);
  return Multiply(layer + "self_attn.o_proj.weight", Attend(q, k, v));
}

ReferenceModel::Vector ReferenceModel::Mlp(const std::string& layer, const Vector& x) const {
  Vector gate = Multiply(layer + "mlp.gate_proj.weight", x);
  const Vector up = Multiply(layer + "mlp.up_proj.weight", x);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
  return Multiply(layer + "mlp.down_proj.weight", gate);
}

std::vector<std::vector<double>> ReferenceModel::Logits(
    absl::Span<const std::int32_t> token_ids) const {
  const std::string embedding = "model.embed_tokens.weight";
  std::vector<std::vector<Vector>> k(config_.num_layers);
  std::vector<std::vector<Vector>> v(config_.num_layers);
  std::vector<std::vector<double>> logits;
  for (std::int32_t id : token_ids) {
    const auto row = tensors_.at(embedding).begin() + std::int64_t{id} * config_.hidden_size;
    Vector x(row, row + config_.hidden_size);
    for (int l = 0; l < config_.num_layers; ++l) {
      const std::string layer = fmt::format("model.layers.{}.", l);
      Add(Attention(layer, Norm(layer + "input_layernorm.weight", x), k[l], v[l]), x);
      Add(Mlp(layer, Norm(layer + "post_attention_layernorm.weight", x)), x);
    }
    const std::string head = config_.tie_word_embeddings ? embedding : "lm_head.weight";
    logits.push_back(Multiply(head, Norm("model.norm.weight", x)));
  }
  return logits;
}

}  // namespace weft
