#include "worker/model/decoder_weights.h"

#include <initializer_list>
#include <string>
#include <string_view>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

using kernels::MatrixView;
using kernels::PackedMatrix;

// Packs named parts of one checkpoint; adds the tensor's name to what packing reports.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, DType dtype, kernels::Stream& stream)
      : checkpoint_(checkpoint), dtype_(dtype), stream_(stream) {}

  struct RowPart {
    std::string name;
    std::int64_t rows;  // of the whole tensor
    IndexRange range;   // of rows to take
  };

  absl::StatusOr<PackedMatrix> Rows(std::initializer_list<RowPart> parts, std::int64_t cols) const {
    std::vector<MatrixView> views;
    std::string names;
    for (const RowPart& part : parts) {
      ASSIGN_OR_RETURN(MatrixView view, checkpoint_.Rows(part.name, part.rows, cols,
                                                         part.range.begin, part.range.end));
      views.push_back(view);
      names += names.empty() ? part.name : ", " + part.name;
    }
    return Pack(names, views);
  }

  absl::StatusOr<PackedMatrix> Columns(const std::string& name, std::int64_t rows,
                                       std::int64_t cols, IndexRange range) const {
    ASSIGN_OR_RETURN(MatrixView view,
                     checkpoint_.Columns(name, rows, cols, range.begin, range.end));
    return Pack(name, {view});
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, std::int64_t size) const {
    return checkpoint_.Vector(name, size, 0, size);
  }

  // The biases of `parts`, one after the other.
  absl::StatusOr<std::vector<float>> Biases(std::initializer_list<RowPart> parts) const {
    std::vector<float> all;
    for (const RowPart& part : parts) {
      ASSIGN_OR_RETURN(std::vector<float> bias,
                       checkpoint_.Vector(part.name, part.rows, part.range.begin, part.range.end));
      all.insert(all.end(), bias.begin(), bias.end());
    }
    return all;
  }

 private:
  absl::StatusOr<PackedMatrix> Pack(std::string_view names,
                                    const std::vector<MatrixView>& views) const {
    absl::StatusOr<PackedMatrix> packed = PackedMatrix::Pack(views, dtype_, stream_);
    if (packed.ok()) return packed;
    return absl::Status(packed.status().code(),
                        fmt::format("{}: {}", names, std::string(packed.status().message())));
  }

  const Checkpoint& checkpoint_;
  DType dtype_;
  kernels::Stream& stream_;
};

IndexRange Scaled(IndexRange range, std::int32_t factor) {
  return {range.begin * factor, range.end * factor};
}

absl::Status LoadAttention(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
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

// Names of an MLP's three tensors, without ".weight".
struct MlpNames {
  std::string gate;
  std::string up;
  std::string down;
};

// `own`: the part of `width` to take.
absl::StatusOr<PackedMatrix> LoadGateUp(const Loader& loader, const ModelConfig& c,
                                        const MlpNames& names, std::int32_t width, IndexRange own) {
  return loader.Rows({{names.gate + ".weight", width, own}, {names.up + ".weight", width, own}},
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
  ASSIGN_OR_RETURN(w.router, loader.Rows({{block + "gate.weight", moe.num_experts, all_experts}},
                                         c.hidden_size));
  if (moe.score_bias) {
    ASSIGN_OR_RETURN(w.score_bias,
                     loader.Vector(block + "gate.e_score_correction_bias", moe.num_experts));
  }
  const IndexRange experts = expert_parallel ? layout.Slice(moe.num_experts) : all_experts;
  const std::int32_t width = moe.intermediate_size;
  const IndexRange own = expert_parallel ? IndexRange{0, width} : layout.Slice(width);
  w.first_expert = experts.begin;
  for (std::int32_t e = experts.begin; e < experts.end; ++e) {
    const std::string prefix = fmt::format("{}experts.{}.", block, e);
    const MlpNames names = {fmt::format("{}{}", prefix, moe.gate),
                            fmt::format("{}{}", prefix, moe.up),
                            fmt::format("{}{}", prefix, moe.down)};
    ASSIGN_OR_RETURN(PackedMatrix gate_up, LoadGateUp(loader, c, names, width, own));
    w.gate_up.push_back(std::move(gate_up));
    ASSIGN_OR_RETURN(PackedMatrix down, LoadDown(loader, c, names, width, own));
    w.down.push_back(std::move(down));
  }
  return absl::OkStatus();
}

absl::Status LoadLayer(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                       bool expert_parallel, std::int32_t index, DecoderLayerWeights& w) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  ASSIGN_OR_RETURN(w.input_norm, loader.Vector(prefix + "input_layernorm.weight", c.hidden_size));
  RETURN_IF_ERROR(LoadAttention(loader, c, layout, prefix + "self_attn.", w));
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

}  // namespace

absl::Status CheckRanksCanShare(const ModelConfig& config, const ShardLayout& layout,
                                bool expert_parallel) {
  const std::int32_t tp = layout.tensor_parallel_size();
  struct Dimension {
    std::string_view key;
    std::int32_t size;
  };
  std::vector<Dimension> dimensions = {{"vocab_size", config.vocab_size}};
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.HasExperts(layer)) continue;
    dimensions.push_back({"intermediate_size", config.intermediate_size});
    break;
  }
  if (config.moe.has_value()) {
    const MoeConfig& moe = *config.moe;
    dimensions.push_back(expert_parallel ? Dimension{"the number of experts", moe.num_experts}
                                         : Dimension{"an expert's width", moe.intermediate_size});
    if (moe.shared_intermediate_size > 0) {
      dimensions.push_back({"the shared experts' width", moe.shared_intermediate_size});
    }
  } else if (expert_parallel) {
    return absl::InvalidArgumentError(
        fmt::format("--enable-expert-parallel is set, but {} has no experts", config.architecture));
  }
  for (const Dimension& dimension : dimensions) {
    if (dimension.size >= tp) continue;
    return absl::InvalidArgumentError(fmt::format(
        "--tensor-parallel-size is {}; {} of this model is {}, so at most as many ranks "
        "can share it",
        tp, dimension.key, dimension.size));
  }
  return absl::OkStatus();
}

std::int64_t DecoderWeights::SizeBytes() const {
  const auto bytes_of = [](const auto& parts) {
    std::int64_t bytes = 0;
    for (const auto* part : parts) bytes += static_cast<std::int64_t>(part->size() * sizeof(float));
    return bytes;
  };
  std::int64_t bytes = embedding.size_bytes() + lm_head.size_bytes();
  using Vectors = std::initializer_list<const std::vector<float>*>;
  bytes += bytes_of(Vectors{&final_norm});
  for (const DecoderLayerWeights& w : layers) {
    for (const PackedMatrix* matrix : {&w.q, &w.kv, &w.o, &w.gate_up, &w.down, &w.moe.router}) {
      bytes += matrix->size_bytes();
    }
    for (const auto* matrices : {&w.moe.gate_up, &w.moe.down}) {
      for (const PackedMatrix& matrix : *matrices) bytes += matrix.size_bytes();
    }
    bytes +=
        bytes_of(Vectors{&w.input_norm, &w.q_bias, &w.kv_bias, &w.o_bias, &w.q_norm, &w.k_norm,
                         &w.post_attention_norm, &w.gate_up_bias, &w.down_bias, &w.moe.score_bias});
  }
  return bytes;
}

absl::StatusOr<DecoderWeights> LoadDecoderWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const ShardLayout& layout, DType dtype,
                                                  bool expert_parallel, kernels::Stream& stream,
                                                  const std::function<void(int done)>& on_layer) {
  const Loader loader(checkpoint, dtype, stream);
  const IndexRange vocab = layout.Slice(config.vocab_size);

  DecoderWeights weights;
  ASSIGN_OR_RETURN(
      weights.embedding,
      loader.Rows({{"model.embed_tokens.weight", config.vocab_size, vocab}}, config.hidden_size));
  if (!config.tie_word_embeddings) {
    ASSIGN_OR_RETURN(weights.lm_head, loader.Rows({{"lm_head.weight", config.vocab_size, vocab}},
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
