#include "tests/worker/reference_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include "fmt/format.h"
#include "kernels/cpu/convert.h"
#include "kernels/device/cpu_target.h"
#include "server/base/check.h"

namespace weft {
namespace {

double RoundedTo(DType dtype, double value) {
  std::uint32_t memory = 0;
  kernels::StoreElement(&memory, 0, dtype, static_cast<float>(value));
  return kernels::LoadElement(&memory, 0, dtype);
}

// Rounds groups of 32 inputs to integers of `bits` bits and a float16 scale.
void Quantize(int bits, std::size_t cols, std::vector<float>& values) {
  for (std::size_t row = 0; row < values.size(); row += cols) {
    for (std::size_t first = 0; first < cols; first += 32) {
      const auto group =
          absl::MakeSpan(values).subspan(row + first, std::min<std::size_t>(32, cols - first));
      const double largest = *std::max_element(
          group.begin(), group.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
      // Of bytes -127 to 127; of halves of bytes -8 to 7, with the largest at -8.
      const double low = bits == 8 ? -127 : -8, high = bits == 8 ? 127 : 7;
      const double scale =
          RoundedTo(DType::kFloat16, bits == 8 ? std::abs(largest) / high : largest / low);
      for (float& value : group) {
        const double q = scale == 0 ? 0 : std::clamp(std::nearbyint(value / scale), low, high);
        value = static_cast<float>(q * scale);
      }
    }
  }
}

// Whether `name` is of float32 where others are of integers.
bool StaysFloat(const std::string& name) {
  return name.ends_with(".gate") || name.ends_with(".kv_b_proj");
}

// As kernels with dot products take the input of a product.
void RoundInputs(WeightFormat format, std::vector<double>& x) {
  if (format == WeightFormat::kBFloat16) {
    for (double& value : x) value = RoundedTo(DType::kBFloat16, value);
    return;
  }
  for (std::size_t first = 0; first < x.size(); first += 32) {
    const auto group =
        absl::MakeSpan(x).subspan(first, std::min<std::size_t>(32, x.size() - first));
    double largest = 0;
    for (const double value : group) largest = std::max(largest, std::abs(value));
    if (largest == 0) continue;
    for (double& value : group) value = std::nearbyint(value / largest * 32767) * largest / 32767;
  }
}

void Round(WeightFormat format, const std::string& name, std::size_t cols,
           std::vector<float>& values) {
  if (const std::optional<DType> dtype = DTypeOf(format)) {
    for (float& value : values) value = static_cast<float>(RoundedTo(*dtype, value));
    return;
  }
  const bool outer = name.starts_with("lm_head.") || name.starts_with("model.embed_tokens.");
  if (StaysFloat(name.substr(0, name.rfind('.')))) return;
  Quantize(format == WeightFormat::kInt8 || outer ? 8 : 4, cols, values);
}

void Add(const std::vector<double>& x, std::vector<double>& to, double weight = 1) {
  for (std::size_t i = 0; i < x.size(); ++i) to[i] += weight * x[i];
}

// The mean of value(t) over tokens [first, end) by weight(t).
std::vector<double> WeightedSum(std::size_t first, std::size_t end, std::size_t dim,
                                const std::function<double(std::size_t)>& weight_of,
                                const std::function<double(std::size_t, std::size_t)>& value) {
  std::vector<double> out(dim);
  double sum = 0;
  for (std::size_t t = first; t < end; ++t) {
    const double weight = weight_of(t);
    sum += weight;
    for (std::size_t d = 0; d < dim; ++d) out[d] += weight * value(t, d);
  }
  for (double& x : out) x /= sum;
  return out;
}

// Indices by descending value.
std::vector<int> Ranked(const std::vector<double>& values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

// The chosen experts: those of the best groups alone, then the best of them.
std::vector<int> Choose(const MoeConfig& moe, const std::vector<double>& ranks) {
  const std::size_t size = moe.num_experts / moe.num_groups;
  std::vector<double> groups;
  for (int g = 0; g < moe.num_groups; ++g) {
    std::vector<double> best(ranks.begin() + g * size, ranks.begin() + (g + 1) * size);
    std::sort(best.rbegin(), best.rend());
    const bool two = moe.group_score == kernels::GroupScore::kSumOfBestTwo && size > 1;
    groups.push_back(best[0] + (two ? best[1] : 0));
  }
  const std::vector<int> group_order = Ranked(groups);
  const auto kept =
      group_order.begin() +
      (moe.group_score == kernels::GroupScore::kNone ? moe.num_groups : moe.groups_per_token);
  std::vector<int> chosen;
  for (int expert : Ranked(ranks)) {
    const int group = expert / static_cast<int>(size);
    if (std::find(group_order.begin(), kept, group) == kept) continue;
    if (static_cast<int>(chosen.size()) < moe.experts_per_token) chosen.push_back(expert);
  }
  return chosen;
}

}  // namespace

ReferenceModel::ReferenceModel(const std::filesystem::path& dir, WeightFormat weights, DType kv,
                               std::optional<DType> dtype, bool rounds)
    : config_(*LoadModelConfig(dir)),
      weights_(weights),
      round_inputs_(rounds && weights != WeightFormat::kFloat32 &&
                    weights != WeightFormat::kFloat16),
      round_attention_(rounds && dtype.value_or(DTypeOf(weights).value_or(DType::kFloat32)) ==
                                     DType::kBFloat16),
      kv_(kv),
      rope_(ComputeRopeFrequencies(config_.rope, config_.rotary_dim)) {
  for (const auto& file : std::filesystem::directory_iterator(dir)) {
    const std::string name = file.path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) {
      tensors_.merge(ReadGoldenTensors(file.path()));
    }
  }
  for (auto& [name, tensor] : tensors_) {
    if (tensor.shape.size() != 2) continue;  // norms and biases stay as they are
    Round(weights, name, tensor.shape.back(), tensor.values);
  }
}

ReferenceModel::Vector ReferenceModel::Linear(const std::string& name, const Vector& x) const {
  const std::vector<float>& w = tensors_.at(name + ".weight").values;
  Vector y(w.size() / x.size());
  Vector inputs = x;
  const bool integers = !DTypeOf(weights_).has_value();
  if (round_inputs_ && !(integers && StaysFloat(name))) RoundInputs(weights_, inputs);
  for (std::size_t row = 0; row < y.size(); ++row) {
    const float* in = w.data() + row * x.size();
    for (std::size_t i = 0; i < x.size(); ++i) y[row] += in[i] * inputs[i];
    if (Has(name + ".bias")) y[row] += tensors_.at(name + ".bias").values[row];
  }
  return y;
}

void ReferenceModel::Norm(const std::string& name, double eps, std::size_t begin, Vector& x) const {
  const std::vector<float>& weight = tensors_.at(name + ".weight").values;
  double squares = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) squares += x[begin + i] * x[begin + i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(weight.size()) + eps);
  for (std::size_t i = 0; i < weight.size(); ++i) x[begin + i] *= factor * weight[i];
}

ReferenceModel::Vector ReferenceModel::Normed(const std::string& name, Vector x) const {
  Norm(name, double{config_.rms_norm_eps}, 0, x);
  return x;
}

ReferenceModel::Vector ReferenceModel::Rounded(Vector x) const {
  for (double& value : x) value = RoundedTo(kv_, value);
  return x;
}

void ReferenceModel::Rotate(std::int64_t position, std::size_t begin, Vector& x) const {
  const std::size_t half = rope_.inv_freq.size();
  const bool interleaved = config_.mla.has_value() && config_.mla->rope_interleave;
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * rope_.inv_freq[i];
    const double c = std::cos(angle) * rope_.attention_scaling;
    const double s = std::sin(angle) * rope_.attention_scaling;
    double& a = x[begin + (interleaved ? 2 * i : i)];
    double& b = x[begin + (interleaved ? 2 * i + 1 : i + half)];
    const double rotated = a * c - b * s;
    b = b * c + a * s;
    a = rotated;
  }
}

ReferenceModel::Vector ReferenceModel::Attention(const std::string& layer, int index,
                                                 const Vector& x, Cache& cache) const {
  const std::string prefix = layer + "self_attn.";
  const auto position = static_cast<std::int64_t>(cache.k.size());
  const std::size_t dim = config_.head_dim;
  const auto heads_of = [&](const char* projection, const char* norm) {
    Vector y = Linear(prefix + projection, x);
    for (std::size_t at = 0; at < y.size(); at += dim) {
      if (Has(prefix + norm + ".weight")) Norm(prefix + norm, config_.rms_norm_eps, at, y);
      Rotate(position, at, y);
    }
    return y;
  };
  const auto as_input = [&](Vector y) {
    if (round_attention_) RoundInputs(WeightFormat::kBFloat16, y);
    return y;
  };
  // Scores in base 2, as the kernel's, so that what is rounded is the same.
  Vector q = heads_of("q_proj", "q_norm");
  for (double& value : q) value *= std::numbers::log2e / std::sqrt(static_cast<double>(dim));
  q = as_input(std::move(q));
  cache.k.push_back(as_input(Rounded(heads_of("k_proj", "k_norm"))));
  cache.v.push_back(as_input(Rounded(Linear(prefix + "v_proj", x))));
  const std::int64_t window = config_.HasWindow(index) ? config_.sliding_window : position + 1;
  const auto first = static_cast<std::size_t>(std::max<std::int64_t>(0, position + 1 - window));
  Vector out;
  for (int h = 0; h < config_.num_q_heads; ++h) {
    const std::size_t kv = h / (config_.num_q_heads / config_.num_kv_heads) * dim;
    const auto weight = [&](std::size_t t) {
      double sum = 0;
      for (std::size_t d = 0; d < dim; ++d) sum += q[h * dim + d] * cache.k[t][kv + d];
      return round_attention_ ? RoundedTo(DType::kBFloat16, std::exp2(sum)) : std::exp2(sum);
    };
    const Vector head =
        WeightedSum(first, cache.k.size(), dim, weight,
                    [&](std::size_t t, std::size_t d) { return cache.v[t][kv + d]; });
    out.insert(out.end(), head.begin(), head.end());
  }
  return Linear(prefix + "o_proj", out);
}

ReferenceModel::Vector ReferenceModel::LatentAttention(const std::string& layer, const Vector& x,
                                                       Cache& cache) const {
  constexpr double kEps = 1e-6;
  const MlaConfig& mla = *config_.mla;
  const std::string prefix = layer + "self_attn.";
  const auto position = static_cast<std::int64_t>(cache.k.size());
  const std::size_t nope = mla.qk_nope_head_dim;
  const std::size_t q_dim = mla.qk_head_dim();
  Vector q = x;
  if (Has(prefix + "q_a_proj.weight")) {
    q = Linear(prefix + "q_a_proj", x);
    Norm(prefix + "q_a_layernorm", kEps, 0, q);
  }
  q = Linear(prefix + (Has(prefix + "q_proj.weight") ? "q_proj" : "q_b_proj"), q);
  for (std::size_t at = nope; at < q.size(); at += q_dim) Rotate(position, at, q);
  Vector latent = Linear(prefix + "kv_a_proj_with_mqa", x);
  Norm(prefix + "kv_a_layernorm", kEps, 0, latent);
  Rotate(position, mla.kv_lora_rank, latent);
  cache.k.push_back(Rounded(latent));

  std::vector<Vector> kv;  // K without its rotary part, and V, of every head and token
  for (const Vector& token : cache.k) {
    kv.push_back(
        Linear(prefix + "kv_b_proj", Vector(token.begin(), token.begin() + mla.kv_lora_rank)));
  }
  Vector out;
  for (int h = 0; h < config_.num_q_heads; ++h) {
    const std::size_t at = h * (nope + mla.v_head_dim);
    const auto weight = [&](std::size_t t) {
      double sum = 0;
      for (std::size_t d = 0; d < nope; ++d) sum += q[h * q_dim + d] * kv[t][at + d];
      for (std::size_t d = nope; d < q_dim; ++d) {
        sum += q[h * q_dim + d] * cache.k[t][mla.kv_lora_rank + d - nope];
      }
      return std::exp(sum * config_.attention_scale);
    };
    const Vector head =
        WeightedSum(0, cache.k.size(), mla.v_head_dim, weight,
                    [&](std::size_t t, std::size_t d) { return kv[t][at + nope + d]; });
    out.insert(out.end(), head.begin(), head.end());
  }
  return Linear(prefix + "o_proj", out);
}

ReferenceModel::Vector ReferenceModel::Mlp(const std::string& gate, const std::string& up,
                                           const std::string& down, const Vector& x) const {
  Vector y = Linear(gate, x);
  const Vector other = Linear(up, x);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= other[i] / (1 + std::exp(-y[i]));
  return Linear(down, y);
}

ReferenceModel::Vector ReferenceModel::Experts(const std::string& block, const Vector& x) const {
  const MoeConfig& moe = *config_.moe;
  Vector scores = Linear(block + "gate", x);
  double all = 0;
  for (double& score : scores) {
    score =
        moe.score == kernels::ExpertScore::kSigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score);
    all += score;
  }
  Vector ranks = scores;
  for (std::size_t e = 0; e < scores.size(); ++e) {
    if (moe.score == kernels::ExpertScore::kSoftmax) ranks[e] = scores[e] /= all;
    const std::string bias = block + "gate.e_score_correction_bias";
    if (Has(bias)) ranks[e] += tensors_.at(bias).values[e];
  }
  const std::vector<int> chosen = Choose(moe, ranks);
  double sum = 0;
  for (int expert : chosen) sum += scores[expert];
  Vector out(x.size());
  for (int expert : chosen) {
    const std::string name = fmt::format("{}experts.{}.", block, expert);
    const auto part = [&](std::string_view what) { return fmt::format("{}{}", name, what); };
    Add(Mlp(part(moe.gate), part(moe.up), part(moe.down), x), out,
        scores[expert] * moe.scale / (moe.normalize ? sum : 1));
  }
  return out;
}

ReferenceModel::Vector ReferenceModel::Feed(const std::string& layer, int index,
                                            const Vector& x) const {
  const auto mlp = [&](const std::string& name) {
    return Mlp(name + "gate_proj", name + "up_proj", name + "down_proj", x);
  };
  if (!config_.HasExperts(index)) return mlp(layer + "mlp.");
  const std::string block = fmt::format("{}{}.", layer, config_.moe->block);
  Vector out = Experts(block, x);
  const std::string shared = block + "shared_experts.";
  if (Has(shared + "gate_proj.weight")) Add(mlp(shared), out);
  return out;
}

std::vector<std::vector<double>> ReferenceModel::Logits(
    absl::Span<const std::int32_t> token_ids) const {
  const std::string embedding = "model.embed_tokens";
  const std::string head = config_.tie_word_embeddings ? embedding : "lm_head";
  std::vector<Cache> caches(config_.num_layers);
  std::vector<std::vector<double>> logits;
  for (std::int32_t id : token_ids) {
    const auto row =
        tensors_.at(embedding + ".weight").values.begin() + std::int64_t{id} * config_.hidden_size;
    Vector x(row, row + config_.hidden_size);
    for (int l = 0; l < config_.num_layers; ++l) {
      const std::string layer = fmt::format("model.layers.{}.", l);
      const Vector normed = Normed(layer + "input_layernorm", x);
      Add(config_.mla.has_value() ? LatentAttention(layer, normed, caches[l])
                                  : Attention(layer, l, normed, caches[l]),
          x);
      Add(Feed(layer, l, Normed(layer + "post_attention_layernorm", x)), x);
    }
    logits.push_back(Linear(head, Normed("model.norm", x)));
  }
  return logits;
}

}  // namespace weft
