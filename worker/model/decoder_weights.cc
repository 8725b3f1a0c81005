#include "worker/model/decoder_weights.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "fmt/format.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

using kernels::MatrixView;
using kernels::PackedMatrix;

// Packs named parts of one checkpoint; adds the tensor's name to what packing reports.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, WeightFormat format, DType dtype, kernels::Stream& stream)
      : checkpoint_(checkpoint), format_(format), dtype_(dtype), stream_(stream) {}

  Loader With(WeightFormat format) const { return {checkpoint_, format, dtype_, stream_}; }
  // For what is small, or used in two forms that have to agree: not quantized.
  Loader Plain() const { return With(FormatOf(dtype_)); }

  struct RowPart {
    std::string name;
    std::int64_t rows;      // of the whole tensor
    IndexRange range;       // of rows to take
    std::int32_t step = 1;  // every so many of them
  };

  absl::StatusOr<PackedMatrix> Rows(absl::Span<const RowPart> parts, std::int64_t cols) const {
    std::vector<MatrixView> views;
    std::string names;
    for (const RowPart& part : parts) {
      ASSIGN_OR_RETURN(MatrixView view, View(part, cols));
      views.push_back(view);
      if (!names.ends_with(part.name)) names += names.empty() ? part.name : ", " + part.name;
    }
    return Pack(names, views);
  }

  // Of an MLP: on the CPU as a gated weight, on a device one after the other.
  absl::StatusOr<PackedMatrix> GateUp(const RowPart& gate, const RowPart& up,
                                      std::int64_t cols) const {
    if (!on_cpu()) return Rows({gate, up}, cols);
    ASSIGN_OR_RETURN(const MatrixView gate_view, View(gate, cols));
    ASSIGN_OR_RETURN(const MatrixView up_view, View(up, cols));
    return Named(gate.name + ", " + up.name,
                 PackedMatrix::PackGated(gate_view, up_view, format_, stream_));
  }

  absl::StatusOr<PackedMatrix> Columns(const std::string& name, std::int64_t rows,
                                       std::int64_t cols, IndexRange range) const {
    ASSIGN_OR_RETURN(MatrixView view,
                     checkpoint_.Columns(name, rows, cols, range.begin, range.end));
    return Pack(name, {view});
  }

  // `range` of its rows, as columns.
  absl::StatusOr<PackedMatrix> Transposed(const std::string& name, std::int64_t rows,
                                          std::int64_t cols, IndexRange range) const {
    ASSIGN_OR_RETURN(MatrixView view, checkpoint_.Rows(name, rows, cols, range.begin, range.end));
    std::swap(view.rows, view.cols);
    std::swap(view.row_stride, view.col_stride);
    return Pack(name, {view});
  }

  absl::StatusOr<kernels::Vector> Vector(const std::string& name, std::int64_t size) const {
    ASSIGN_OR_RETURN(const std::vector<float> values, checkpoint_.Vector(name, size, 0, size));
    return kernels::Vector::Create(values, stream_);
  }

  absl::StatusOr<kernels::MatrixGroup> Group(std::vector<PackedMatrix> matrices) const {
    return kernels::MatrixGroup::Create(std::move(matrices), stream_);
  }

  bool on_cpu() const { return stream_.device() == kernels::DeviceKind::kCpu; }

  // The biases of `parts`, one after the other.
  absl::StatusOr<kernels::Vector> Biases(absl::Span<const RowPart> parts) const {
    std::vector<float> all;
    for (const RowPart& part : parts) {
      ASSIGN_OR_RETURN(std::vector<float> bias,
                       checkpoint_.Vector(part.name, part.rows, part.range.begin, part.range.end));
      for (std::size_t i = 0; i < bias.size(); i += part.step) all.push_back(bias[i]);
    }
    return kernels::Vector::Create(all, stream_);
  }

 private:
  absl::StatusOr<MatrixView> View(const RowPart& part, std::int64_t cols) const {
    ASSIGN_OR_RETURN(MatrixView view, checkpoint_.Rows(part.name, part.rows, cols, part.range.begin,
                                                       part.range.end));
    view.rows = CeilDiv(view.rows, part.step);
    view.row_stride *= part.step;
    return view;
  }

  absl::StatusOr<PackedMatrix> Pack(std::string_view names,
                                    const std::vector<MatrixView>& views) const {
    return Named(names, PackedMatrix::Pack(views, format_, stream_));
  }

  static absl::StatusOr<PackedMatrix> Named(std::string_view names,
                                            absl::StatusOr<PackedMatrix> packed) {
    if (packed.ok()) return packed;
    return absl::Status(packed.status().code(),
                        fmt::format("{}: {}", names, std::string(packed.status().message())));
  }

  const Checkpoint& checkpoint_;
  WeightFormat format_;
  DType dtype_;
  kernels::Stream& stream_;
};

IndexRange Scaled(IndexRange range, std::int32_t factor) {
  return {range.begin * factor, range.end * factor};
}

absl::Status LoadGqa(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                     const std::string& prefix, DecoderLayerWeights& w) {
  const std::int32_t q_rows = c.num_q_heads * c.head_dim;
  const std::int32_t kv_rows = c.num_kv_heads * c.head_dim;
  const IndexRange own = Scaled(layout.QHeads(), c.head_dim);
  const IndexRange q = Scaled(layout.ProjectedQHeads(), c.head_dim);
  const IndexRange kv = Scaled(layout.GroupKvHeads(), c.head_dim);

  ASSIGN_OR_RETURN(w.q, loader.Rows({{prefix + "q_proj.weight", q_rows, q}}, c.hidden_size));
  ASSIGN_OR_RETURN(w.kv, loader.Rows({{prefix + "k_proj.weight", kv_rows, kv},
                                      {prefix + "v_proj.weight", kv_rows, kv}},
                                     c.hidden_size));
  ASSIGN_OR_RETURN(w.o, loader.Columns(prefix + "o_proj.weight", c.hidden_size, q_rows, own));
  if (c.qk_norm) {
    ASSIGN_OR_RETURN(w.q_norm, loader.Vector(prefix + "q_norm.weight", c.head_dim));
    ASSIGN_OR_RETURN(w.k_norm, loader.Vector(prefix + "k_norm.weight", c.head_dim));
  }
  if (c.qkv_bias) {
    ASSIGN_OR_RETURN(w.q_bias, loader.Biases({{prefix + "q_proj.bias", q_rows, q}}));
    ASSIGN_OR_RETURN(w.kv_bias, loader.Biases({{prefix + "k_proj.bias", kv_rows, kv},
                                               {prefix + "v_proj.bias", kv_rows, kv}}));
  }
  if (c.o_bias && layout.rank() == 0) {
    ASSIGN_OR_RETURN(w.o_bias, loader.Vector(prefix + "o_proj.bias", c.hidden_size));
  }
  return absl::OkStatus();
}

// Rows [begin, begin + rope) of a rotary part. Where the checkpoint has its pairs side by side,
// they are taken apart into halves, in q and in k alike, so that dot products stay what they are.
void AddRotaryRows(const MlaConfig& mla, const std::string& name, std::int32_t rows,
                   std::int32_t begin, std::vector<Loader::RowPart>& parts) {
  const std::int32_t end = begin + mla.qk_rope_head_dim;
  if (mla.rope_interleave) {
    parts.push_back({name, rows, {begin, end}, 2});
    parts.push_back({name, rows, {begin + 1, end}, 2});
  } else {
    parts.push_back({name, rows, {begin, end}});
  }
}

absl::Status LoadMlaQueries(const Loader& loader, const ModelConfig& c, IndexRange heads,
                            const std::string& prefix, MlaWeights& w) {
  const MlaConfig& mla = *c.mla;
  const bool lora = mla.q_lora_rank > 0;
  if (lora) {
    const Loader::RowPart all = {prefix + "q_a_proj.weight", mla.q_lora_rank, {0, mla.q_lora_rank}};
    ASSIGN_OR_RETURN(w.q_a, loader.Rows({all}, c.hidden_size));
    ASSIGN_OR_RETURN(w.q_a_norm, loader.Vector(prefix + "q_a_layernorm.weight", mla.q_lora_rank));
    if (c.o_bias) {
      ASSIGN_OR_RETURN(w.q_a_bias, loader.Vector(prefix + "q_a_proj.bias", mla.q_lora_rank));
    }
  }
  const std::string name = prefix + (lora ? "q_b_proj.weight" : "q_proj.weight");
  const std::int32_t rows = c.num_q_heads * mla.qk_head_dim();
  std::vector<Loader::RowPart> parts;
  for (std::int32_t head = heads.begin; head < heads.end; ++head) {
    const std::int32_t begin = head * mla.qk_head_dim();
    parts.push_back({name, rows, {begin, begin + mla.qk_nope_head_dim}});
    AddRotaryRows(mla, name, rows, begin + mla.qk_nope_head_dim, parts);
  }
  ASSIGN_OR_RETURN(w.q_b, loader.Rows(parts, lora ? mla.q_lora_rank : c.hidden_size));
  return absl::OkStatus();
}

absl::Status LoadMlaLatent(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                           const std::string& prefix, MlaWeights& w) {
  const MlaConfig& mla = *c.mla;
  const auto parts_of = [&](const std::string& name) {
    std::vector<Loader::RowPart> parts = {{name, c.head_dim, {0, mla.kv_lora_rank}}};
    AddRotaryRows(mla, name, c.head_dim, mla.kv_lora_rank, parts);
    return parts;
  };
  const std::string kv_a = prefix + "kv_a_proj_with_mqa.";
  ASSIGN_OR_RETURN(w.kv_a, loader.Rows(parts_of(kv_a + "weight"), c.hidden_size));
  if (c.o_bias) {
    ASSIGN_OR_RETURN(w.kv_a_bias, loader.Biases(parts_of(kv_a + "bias")));
  }
  ASSIGN_OR_RETURN(w.kv_a_norm, loader.Vector(prefix + "kv_a_layernorm.weight", mla.kv_lora_rank));

  const Loader up = loader.Plain();
  const std::string kv_b = prefix + "kv_b_proj.weight";
  const std::int32_t head_rows = mla.qk_nope_head_dim + mla.v_head_dim;
  const std::int32_t rows = c.num_q_heads * head_rows;
  const IndexRange queries = layout.ProjectedQHeads();
  std::vector<PackedMatrix> k_ups;
  for (std::int32_t head = queries.begin; head < queries.end; ++head) {
    const std::int32_t begin = head * head_rows;
    ASSIGN_OR_RETURN(PackedMatrix k_up, up.Transposed(kv_b, rows, mla.kv_lora_rank,
                                                      {begin, begin + mla.qk_nope_head_dim}));
    k_ups.push_back(std::move(k_up));
  }
  ASSIGN_OR_RETURN(w.k_up, loader.Group(std::move(k_ups)));
  const IndexRange own = layout.QHeads();
  const bool decompresses = CanDecompress(c) && loader.on_cpu();
  std::vector<PackedMatrix> ks_from_latent;
  for (std::int32_t head = own.begin; decompresses && head < own.end; ++head) {
    const std::int32_t begin = head * head_rows;
    ASSIGN_OR_RETURN(PackedMatrix k, up.Rows({{kv_b, rows, {begin, begin + mla.qk_nope_head_dim}}},
                                             mla.kv_lora_rank));
    ks_from_latent.push_back(std::move(k));
  }
  ASSIGN_OR_RETURN(w.k_from_latent, loader.Group(std::move(ks_from_latent)));
  const bool before_merge = MergedDim(c, layout) < c.value_dim;
  const IndexRange values = before_merge ? layout.GroupQHeads() : layout.QHeads();
  std::vector<PackedMatrix> v_ups;
  for (std::int32_t head = values.begin; head < values.end; ++head) {
    const std::int32_t begin = head * head_rows + mla.qk_nope_head_dim;
    ASSIGN_OR_RETURN(PackedMatrix v_up,
                     up.Rows({{kv_b, rows, {begin, begin + mla.v_head_dim}}}, mla.kv_lora_rank));
    v_ups.push_back(std::move(v_up));
  }
  ASSIGN_OR_RETURN(w.v_up, loader.Group(std::move(v_ups)));
  return absl::OkStatus();
}

absl::Status LoadMla(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                     const std::string& prefix, DecoderLayerWeights& w) {
  const IndexRange heads = layout.QHeads();
  RETURN_IF_ERROR(LoadMlaQueries(loader, c, layout.ProjectedQHeads(), prefix, w.mla));
  RETURN_IF_ERROR(LoadMlaLatent(loader, c, layout, prefix, w.mla));
  const std::int32_t v_dim = c.mla->v_head_dim;
  ASSIGN_OR_RETURN(w.o, loader.Columns(prefix + "o_proj.weight", c.hidden_size,
                                       c.num_q_heads * v_dim, Scaled(heads, v_dim)));
  if (c.o_bias && layout.rank() == 0) {
    ASSIGN_OR_RETURN(w.o_bias, loader.Vector(prefix + "o_proj.bias", c.hidden_size));
  }
  return absl::OkStatus();
}

// Names of an MLP's three tensors, without ".weight".
struct MlpNames {
  std::string gate;
  std::string up;
  std::string down;
};

// `own`: the part of `width` to take.
absl::StatusOr<PackedMatrix> LoadGateUp(const Loader& loader, const ModelConfig& c,
                                        const MlpNames& names, std::int32_t width, IndexRange own) {
  return loader.GateUp({names.gate + ".weight", width, own}, {names.up + ".weight", width, own},
                       c.hidden_size);
}

absl::StatusOr<PackedMatrix> LoadDown(const Loader& loader, const ModelConfig& c,
                                      const MlpNames& names, std::int32_t width, IndexRange own) {
  return loader.Columns(names.down + ".weight", c.hidden_size, width, own);
}

absl::Status LoadMlp(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                     const std::string& prefix, std::int32_t width, DecoderLayerWeights& w) {
  const MlpNames names = {prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj"};
  const IndexRange own = layout.Slice(width);
  ASSIGN_OR_RETURN(w.gate_up, LoadGateUp(loader, c, names, width, own));
  ASSIGN_OR_RETURN(w.down, LoadDown(loader, c, names, width, own));
  if (!c.mlp_bias) return absl::OkStatus();

  ASSIGN_OR_RETURN(w.gate_up_bias, loader.Biases({{names.gate + ".bias", width, own},
                                                  {names.up + ".bias", width, own}}));
  if (layout.rank() == 0) {
    ASSIGN_OR_RETURN(w.down_bias, loader.Vector(names.down + ".bias", c.hidden_size));
  }
  return absl::OkStatus();
}

absl::Status LoadExperts(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                         bool expert_parallel, const std::string& layer, MoeWeights& w) {
  const MoeConfig& moe = *c.moe;
  const std::string block = fmt::format("{}{}.", layer, moe.block);
  const IndexRange all_experts = {0, moe.num_experts};
  ASSIGN_OR_RETURN(
      w.router,
      loader.Plain().Rows({{block + "gate.weight", moe.num_experts, all_experts}}, c.hidden_size));
  if (moe.score_bias) {
    ASSIGN_OR_RETURN(w.score_bias,
                     loader.Vector(block + "gate.e_score_correction_bias", moe.num_experts));
  }
  const IndexRange experts = expert_parallel ? layout.Slice(moe.num_experts) : all_experts;
  const std::int32_t width = moe.intermediate_size;
  const IndexRange own = expert_parallel ? IndexRange{0, width} : layout.Slice(width);
  w.first_expert = experts.begin;
  std::vector<PackedMatrix> gate_ups;
  std::vector<PackedMatrix> downs;
  for (std::int32_t e = experts.begin; e < experts.end; ++e) {
    const std::string prefix = fmt::format("{}experts.{}.", block, e);
    const MlpNames names = {fmt::format("{}{}", prefix, moe.gate),
                            fmt::format("{}{}", prefix, moe.up),
                            fmt::format("{}{}", prefix, moe.down)};
    ASSIGN_OR_RETURN(PackedMatrix gate_up, LoadGateUp(loader, c, names, width, own));
    gate_ups.push_back(std::move(gate_up));
    ASSIGN_OR_RETURN(PackedMatrix down, LoadDown(loader, c, names, width, own));
    downs.push_back(std::move(down));
  }
  ASSIGN_OR_RETURN(w.gate_up, loader.Group(std::move(gate_ups)));
  ASSIGN_OR_RETURN(w.down, loader.Group(std::move(downs)));
  return absl::OkStatus();
}

absl::Status LoadLayer(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                       bool expert_parallel, std::int32_t index, DecoderLayerWeights& w) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  ASSIGN_OR_RETURN(w.input_norm, loader.Vector(prefix + "input_layernorm.weight", c.hidden_size));
  const auto load_attention = c.mla.has_value() ? LoadMla : LoadGqa;
  RETURN_IF_ERROR(load_attention(loader, c, layout, prefix + "self_attn.", w));
  ASSIGN_OR_RETURN(w.post_attention_norm,
                   loader.Vector(prefix + "post_attention_layernorm.weight", c.hidden_size));
  if (!c.HasExperts(index)) {
    return LoadMlp(loader, c, layout, prefix + "mlp.", c.intermediate_size, w);
  }
  RETURN_IF_ERROR(LoadExperts(loader, c, layout, expert_parallel, prefix, w.moe));
  if (c.moe->shared_intermediate_size == 0) return absl::OkStatus();
  return LoadMlp(loader, c, layout, prefix + "mlp.shared_experts.", c.moe->shared_intermediate_size,
                 w);
}

template <typename Visit>
void ForEachMatrix(const DecoderWeights& weights, const Visit& visit) {
  visit(weights.embedding);
  visit(weights.lm_head);
  for (const DecoderLayerWeights& w : weights.layers) {
    for (const PackedMatrix* matrix : {&w.mla.q_a, &w.mla.q_b, &w.mla.kv_a, &w.q, &w.kv, &w.o,
                                       &w.gate_up, &w.down, &w.moe.router}) {
      visit(*matrix);
    }
    for (const auto* matrices :
         {&w.mla.k_up, &w.mla.k_from_latent, &w.mla.v_up, &w.moe.gate_up, &w.moe.down}) {
      for (const PackedMatrix& matrix : *matrices) visit(matrix);
    }
  }
}

}  // namespace

std::int64_t DecoderWeights::SizeBytes() const {
  std::int64_t bytes = final_norm.size_bytes();
  ForEachMatrix(*this, [&](const PackedMatrix& matrix) { bytes += matrix.size_bytes(); });
  for (const DecoderLayerWeights& w : layers) {
    for (const kernels::Vector* vector :
         {&w.input_norm, &w.mla.q_a_bias, &w.mla.q_a_norm, &w.mla.kv_a_bias, &w.mla.kv_a_norm,
          &w.q_bias, &w.kv_bias, &w.o_bias, &w.q_norm, &w.k_norm, &w.post_attention_norm,
          &w.gate_up_bias, &w.down_bias, &w.moe.score_bias}) {
      bytes += vector->size_bytes();
    }
  }
  return bytes;
}

std::int32_t DecoderWeights::MaxInFeatures() const {
  std::int32_t most = 0;
  ForEachMatrix(*this,
                [&](const PackedMatrix& matrix) { most = std::max(most, matrix.in_features()); });
  return most;
}

absl::StatusOr<DecoderWeights> LoadDecoderWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const ShardLayout& layout, DType dtype,
                                                  WeightFormat format, bool expert_parallel,
                                                  kernels::Stream& stream,
                                                  const std::function<void(int done)>& on_layer) {
  const Loader loader(checkpoint, format, dtype, stream);
  // What a token is read from and chosen by loses too much in 4 bits.
  const Loader outer = loader.With(format == WeightFormat::kInt4 ? WeightFormat::kInt8 : format);
  const IndexRange vocab = layout.Slice(config.vocab_size);

  DecoderWeights weights;
  ASSIGN_OR_RETURN(
      weights.embedding,
      outer.Rows({{"model.embed_tokens.weight", config.vocab_size, vocab}}, config.hidden_size));
  if (!config.tie_word_embeddings) {
    ASSIGN_OR_RETURN(weights.lm_head, outer.Rows({{"lm_head.weight", config.vocab_size, vocab}},
                                                 config.hidden_size));
  }
  checkpoint.ReleasePages();
  ASSIGN_OR_RETURN(weights.final_norm, loader.Vector("model.norm.weight", config.hidden_size));

  weights.layers.resize(config.num_layers);
  for (int i = 0; i < config.num_layers; ++i) {
    RETURN_IF_ERROR(LoadLayer(loader, config, layout, expert_parallel, i, weights.layers[i]));
    checkpoint.ReleasePages();
    on_layer(i + 1);
  }
  return weights;
}

}  // namespace weft
