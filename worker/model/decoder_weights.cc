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

absl::Status CheckDivides(const ModelConfig& config, const ShardLayout& layout) {
  const std::int32_t tp = layout.tensor_parallel_size();
  if (config.intermediate_size < tp || config.vocab_size < tp) {
    return absl::InvalidArgumentError(
        fmt::format("--tensor-parallel-size is {}; at most intermediate_size ({}) and vocab_size "
                    "({}) ranks can "
                    "share this model",
                    tp, config.intermediate_size, config.vocab_size));
  }
  return absl::OkStatus();
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

absl::Status LoadMlp(const Loader& loader, const ModelConfig& c, const ShardLayout& layout,
                     const std::string& prefix, DecoderLayerWeights& w) {
  const IndexRange own = layout.Slice(c.intermediate_size);
  ASSIGN_OR_RETURN(w.gate_up, loader.Rows({{prefix + "gate_proj.weight", c.intermediate_size, own},
                                           {prefix + "up_proj.weight", c.intermediate_size, own}},
                                          c.hidden_size));
  ASSIGN_OR_RETURN(
      w.down, loader.Columns(prefix + "down_proj.weight", c.hidden_size, c.intermediate_size, own));
  if (!c.mlp_bias) return absl::OkStatus();

  ASSIGN_OR_RETURN(w.gate_up_bias,
                   loader.Biases({{prefix + "gate_proj.bias", c.intermediate_size, own},
                                  {prefix + "up_proj.bias", c.intermediate_size, own}}));
  if (layout.rank() == 0) {
    ASSIGN_OR_RETURN(w.down_bias, loader.Vector(prefix + "down_proj.bias", c.hidden_size));
  }
  return absl::OkStatus();
}

}  // namespace

std::int64_t DecoderWeights::SizeBytes() const {
  std::int64_t bytes = embedding.size_bytes() + lm_head.size_bytes() +
                       static_cast<std::int64_t>(final_norm.size() * sizeof(float));
  for (const DecoderLayerWeights& w : layers) {
    for (const PackedMatrix* matrix : {&w.q, &w.kv, &w.o, &w.gate_up, &w.down}) {
      bytes += matrix->size_bytes();
    }
    for (const std::vector<float>* vector :
         {&w.input_norm, &w.q_bias, &w.kv_bias, &w.o_bias, &w.q_norm, &w.k_norm,
          &w.post_attention_norm, &w.gate_up_bias, &w.down_bias}) {
      bytes += static_cast<std::int64_t>(vector->size() * sizeof(float));
    }
  }
  return bytes;
}

absl::StatusOr<DecoderWeights> LoadDecoderWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint,
                                                  const ShardLayout& layout, DType dtype,
                                                  kernels::Stream& stream,
                                                  const std::function<void(int done)>& on_layer) {
  RETURN_IF_ERROR(CheckDivides(config, layout));
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
    DecoderLayerWeights& w = weights.layers[i];
    const std::string prefix = fmt::format("model.layers.{}.", i);
    ASSIGN_OR_RETURN(w.input_norm,
                     loader.Vector(prefix + "input_layernorm.weight", config.hidden_size));
    RETURN_IF_ERROR(LoadAttention(loader, config, layout, prefix + "self_attn.", w));
    ASSIGN_OR_RETURN(w.post_attention_norm,
                     loader.Vector(prefix + "post_attention_layernorm.weight", config.hidden_size));
    RETURN_IF_ERROR(LoadMlp(loader, config, layout, prefix + "mlp.", w));
    checkpoint.ReleasePages();
    on_layer(i + 1);
  }
  return weights;
}

}  // namespace weft
