// Steps that decode, by the code that serves, of models whose weights nobody has trained: one rank,
// whose peers (if the layout has any) are not there, so that what they exchange costs nothing.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "fmt/format.h"
#include "kernels/cuda/device.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"
#include "tests/bench/cuda_bench.h"
#include "worker/group/communicator.h"
#include "worker/model/rank_runner.h"

namespace weft::bench {
namespace {

using kernels::MatrixGroup;
using kernels::MatrixView;
using kernels::PackedMatrix;
using kernels::Vector;

// Of a group whose other ranks are silent.
class AloneCommunicator final : public Communicator {
 public:
  AloneCommunicator(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  absl::Status AllReduceSum(void*, std::int64_t, DType, kernels::Stream&) override { return {}; }
  absl::Status AllGather(const void*, void*, std::int64_t, kernels::Stream&) override { return {}; }
  absl::Status ReduceScatterSum(const void*, void*, std::int64_t, DType,
                                kernels::Stream&) override {
    return {};
  }
  absl::Status AllToAll(const void*, void*, std::int64_t, kernels::Stream&) override { return {}; }
  absl::Status Gather(const void*, void*, std::int64_t, kernels::Stream&) override { return {}; }
  CollectiveCounters Counters() const override { return {}; }
  std::int64_t workspace_bytes() const override { return 0; }
  void Abort() override {}

 private:
  const int rank_;
  const int size_;
};

// Packs matrices of small numbers, all of one sequence of random ones: rows of a step differ, and
// go to experts of their own.
class Filler {
 public:
  explicit Filler(kernels::Stream& stream) : stream_(stream) {}

  absl::Status Matrix(std::int32_t rows, std::int32_t cols, PackedMatrix& matrix) {
    if (rows == 0) return absl::OkStatus();
    const std::size_t count = static_cast<std::size_t>(rows) * cols;
    while (values_.size() < count) {
      random_ = random_ * 6364136223846793005U + 1442695040888963407U;
      constexpr std::uint16_t kSmall = 0x3A80;  // about 0.001; 8 bits are the sign and the fraction
      const auto bits = static_cast<std::uint16_t>(random_ >> 56);
      values_.push_back(static_cast<std::uint16_t>(kSmall | (bits & 0x80) << 8 | (bits & 0x7F)));
    }
    const MatrixView view = {.data = values_.data(),
                             .dtype = DType::kBFloat16,
                             .rows = rows,
                             .cols = cols,
                             .row_stride = cols};
    ASSIGN_OR_RETURN(matrix, PackedMatrix::Pack({&view, 1}, WeightFormat::kBFloat16, stream_));
    return absl::OkStatus();
  }
  absl::Status Group(std::int32_t count, std::int32_t rows, std::int32_t cols, MatrixGroup& group) {
    std::vector<PackedMatrix> matrices(count);
    for (PackedMatrix& matrix : matrices) RETURN_IF_ERROR(Matrix(rows, cols, matrix));
    ASSIGN_OR_RETURN(group, MatrixGroup::Create(std::move(matrices), stream_));
    return absl::OkStatus();
  }
  absl::Status Ones(std::int32_t size, Vector& vector) {
    ASSIGN_OR_RETURN(vector, Vector::Create(std::vector<float>(size, 1.0F), stream_));
    return absl::OkStatus();
  }

 private:
  kernels::Stream& stream_;
  std::uint64_t random_ = 1;
  std::vector<std::uint16_t> values_;
};

absl::Status FillAttention(const ModelConfig& c, const ShardLayout& layout, Filler& fill,
                           DecoderLayerWeights& w) {
  const std::int32_t heads = layout.QHeads(layout.rank()).size();
  if (!c.mla.has_value()) {
    RETURN_IF_ERROR(fill.Matrix(layout.ProjectedQHeads().size() * c.head_dim, c.hidden_size, w.q));
    RETURN_IF_ERROR(
        fill.Matrix(2 * layout.GroupKvHeads().size() * c.head_dim, c.hidden_size, w.kv));
    return fill.Matrix(c.hidden_size, heads * c.head_dim, w.o);
  }
  const MlaConfig& mla = *c.mla;
  const std::int32_t projected = layout.ProjectedQHeads().size();
  RETURN_IF_ERROR(fill.Matrix(mla.q_lora_rank, c.hidden_size, w.mla.q_a));
  if (mla.q_lora_rank > 0) RETURN_IF_ERROR(fill.Ones(mla.q_lora_rank, w.mla.q_a_norm));
  RETURN_IF_ERROR(fill.Matrix(projected * mla.qk_head_dim(),
                              mla.q_lora_rank > 0 ? mla.q_lora_rank : c.hidden_size, w.mla.q_b));
  RETURN_IF_ERROR(fill.Matrix(c.head_dim, c.hidden_size, w.mla.kv_a));
  RETURN_IF_ERROR(fill.Ones(mla.kv_lora_rank, w.mla.kv_a_norm));
  RETURN_IF_ERROR(fill.Group(projected, mla.kv_lora_rank, mla.qk_nope_head_dim, w.mla.k_up));
  const bool merged_first = MergedDim(c, layout) == c.value_dim;
  RETURN_IF_ERROR(fill.Group(merged_first ? heads : layout.GroupQHeads().size(), mla.v_head_dim,
                             mla.kv_lora_rank, w.mla.v_up));
  return fill.Matrix(c.hidden_size, heads * mla.v_head_dim, w.o);
}

absl::Status FillExperts(const ModelConfig& c, const ShardLayout& layout, Filler& fill,
                         MoeWeights& w) {
  const std::int32_t width = layout.Slice(c.moe->intermediate_size).size();
  RETURN_IF_ERROR(fill.Matrix(c.moe->num_experts, c.hidden_size, w.router));
  RETURN_IF_ERROR(fill.Group(c.moe->num_experts, 2 * width, c.hidden_size, w.gate_up));
  return fill.Group(c.moe->num_experts, c.hidden_size, width, w.down);
}

absl::StatusOr<DecoderWeights> FillWeights(const ModelConfig& c, const ShardLayout& layout,
                                           kernels::Stream& stream) {
  Filler fill(stream);
  DecoderWeights weights;
  const std::int32_t vocab = layout.Slice(c.vocab_size).size();
  RETURN_IF_ERROR(fill.Matrix(vocab, c.hidden_size, weights.embedding));
  RETURN_IF_ERROR(fill.Matrix(vocab, c.hidden_size, weights.lm_head));
  RETURN_IF_ERROR(fill.Ones(c.hidden_size, weights.final_norm));
  weights.layers.resize(c.num_layers);
  const std::int32_t intermediate = layout.Slice(c.intermediate_size).size();
  for (DecoderLayerWeights& layer : weights.layers) {
    RETURN_IF_ERROR(fill.Ones(c.hidden_size, layer.input_norm));
    RETURN_IF_ERROR(fill.Ones(c.hidden_size, layer.post_attention_norm));
    RETURN_IF_ERROR(FillAttention(c, layout, fill, layer));
    std::int32_t width = intermediate;
    if (c.HasExperts(static_cast<std::int32_t>(&layer - weights.layers.data()))) {
      RETURN_IF_ERROR(FillExperts(c, layout, fill, layer.moe));
      width = layout.Slice(c.moe->shared_intermediate_size).size();
    }
    RETURN_IF_ERROR(fill.Matrix(2 * width, c.hidden_size, layer.gate_up));
    RETURN_IF_ERROR(fill.Matrix(c.hidden_size, width, layer.down));
  }
  return weights;
}

struct Model {
  std::string_view name;
  ModelConfig config;
  std::int32_t tp = 1;
  std::int32_t dcp = 1;
};

struct Load {
  std::int32_t num_seqs;
  std::int32_t len;
  double share;  // of the floor that the bytes of weights and KV set
};

// The first step of the result brings the tables; all decode the token behind `len`.
StepPlan PlanOf(const Load& load, std::int32_t blocks_of_each, std::int32_t vocab_size) {
  StepPlan plan;
  plan.step = 1;
  for (std::int32_t s = 0; s < load.num_seqs; ++s) {
    plan.table_deltas.push_back({.slot = s, .num_blocks = blocks_of_each});
    for (std::int32_t i = 0; i < blocks_of_each; ++i) {
      plan.delta_blocks.push_back(s * blocks_of_each + i);
    }
    plan.sequences.push_back(
        {.slot = s, .num_rows = 1, .first_position = load.len, .num_sampled = 1});
    plan.token_ids.push_back(s % vocab_size);
  }
  return plan;
}

// Of experts that none of `num_rows` rows goes to, if they choose at random.
double IdleExpertBytes(const ModelConfig& config, const DecoderWeights& weights,
                       std::int32_t num_rows) {
  if (!config.moe.has_value()) return 0;
  double bytes = 0;
  for (const DecoderLayerWeights& layer : weights.layers) {
    for (const MatrixGroup* group : {&layer.moe.gate_up, &layer.moe.down}) {
      for (const PackedMatrix& matrix : *group) bytes += static_cast<double>(matrix.size_bytes());
    }
  }
  const double chosen = 1.0 * config.moe->experts_per_token / config.moe->num_experts;
  return bytes * std::pow(1 - chosen, num_rows);
}

absl::Status MeasureLoad(CudaBench& bench, const Model& model, const ShardLayout& layout,
                         const DecoderWeights& weights, const Load& load) {
  // A stream of its own each: what a runner reserves on its stream stays there.
  kernels::CpuStream host(1);
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::cuda::CudaDevice> device,
                   kernels::cuda::CudaDevice::Open(0, host));
  const ModelConfig& config = model.config;
  const std::int32_t blocks_of_each = CeilDiv(load.len + 1, layout.block_size());
  const KvCacheShape shape = {.num_layers = config.num_layers,
                              .num_kv_heads = layout.GroupKvHeads().size(),
                              .head_dim = config.head_dim,
                              .value_dim = config.mla.has_value() ? 0 : config.value_dim,
                              .block_tokens_per_rank = layout.block_tokens_per_rank(),
                              .dtype = DType::kBFloat16};
  ASSIGN_OR_RETURN(KvCache cache, KvCache::Create(shape, blocks_of_each * load.num_seqs, *device));
  RETURN_IF_ERROR(kernels::cuda::StatusOf(
      cudaMemsetAsync(cache.k_blocks(0), 0, static_cast<std::size_t>(cache.size_bytes()),
                      bench.stream().handle()),
      "cudaMemsetAsync"));
  RETURN_IF_ERROR(bench.stream().Synchronize());
  AloneCommunicator world(layout.rank(), layout.tensor_parallel_size());
  AloneCommunicator dcp(layout.dcp_rank(), layout.decode_context_parallel_size());
  ASSIGN_OR_RETURN(const std::unique_ptr<RankRunner> runner,
                   RankRunner::Create(config, layout, weights, cache, world, dcp,
                                      {.max_num_seqs = load.num_seqs,
                                       .max_num_batched_tokens = load.num_seqs,
                                       .max_model_len = load.len + 1,
                                       .exchange = DcpExchange::kA2a},
                                      *device));
  RETURN_IF_ERROR(runner->CaptureGraphs());
  StepPlan plan = PlanOf(load, blocks_of_each, config.vocab_size);
  std::vector<double> seconds;
  for (int i = 0; i < (bench.dry_run() ? 2 : 40); ++i) {
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(runner->Execute(plan, {}).status());
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    ++plan.step;
    plan.table_deltas.clear();
    plan.delta_blocks.clear();
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  const double kv = static_cast<double>(shape.BytesPerLocalToken()) * layout.LocalLength(load.len) *
                    load.num_seqs;
  const double embedding = static_cast<double>(weights.embedding.size_bytes());
  bench.Report("steps", fmt::format("{}, b{} x {}", model.name, load.num_seqs, load.len),
               seconds[seconds.size() / 2],
               static_cast<double>(weights.SizeBytes()) - embedding -
                   IdleExpertBytes(config, weights, load.num_seqs) + kv,
               0, load.share);
  return absl::OkStatus();
}

absl::Status MeasureModel(CudaBench& bench, const Model& model, const std::vector<Load>& loads) {
  kernels::CpuStream host(bench.dry_run() ? 1 : 8);
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::cuda::CudaDevice> device,
                   kernels::cuda::CudaDevice::Open(0, host));
  ASSIGN_OR_RETURN(
      const ShardLayout layout,
      ShardLayout::Create(
          {.tensor_parallel_size = model.tp,
           .decode_context_parallel_size = model.dcp,
           .min_block_size = bench.Size(256, 16)},
          {.num_q_heads = model.config.num_q_heads, .num_kv_heads = model.config.num_kv_heads}, 0));
  ASSIGN_OR_RETURN(const DecoderWeights weights, FillWeights(model.config, layout, *device));
  for (const Load& load : loads) {
    RETURN_IF_ERROR(MeasureLoad(bench, model, layout, weights, load));
  }
  return absl::OkStatus();
}

ModelConfig GqaConfig(const CudaBench& bench) {
  ModelConfig config;
  config.num_layers = bench.Size(32, 2);
  config.hidden_size = bench.Size(4096, 64);
  config.intermediate_size = bench.Size(14336, 64);
  config.num_q_heads = bench.Size(32, 4);
  config.num_kv_heads = bench.Size(8, 2);
  config.head_dim = config.value_dim = config.rotary_dim = bench.Size(128, 16);
  config.attention_scale = 0.1F;
  config.vocab_size = bench.Size(128256, 64);
  config.max_position_embeddings = 131072;
  return config;
}

// Attention of DeepSeek-R1, and next to nothing else.
ModelConfig MlaConfigOf(const CudaBench& bench) {
  ModelConfig config;
  config.num_layers = bench.Size(61, 2);
  config.hidden_size = bench.Size(7168, 64);
  config.intermediate_size = bench.Size(256, 64);
  config.num_q_heads = bench.Size(128, 8);
  config.num_kv_heads = 1;
  config.mla = {.q_lora_rank = bench.Size(1536, 16),
                .kv_lora_rank = bench.Size(512, 16),
                .qk_nope_head_dim = bench.Size(128, 16),
                .qk_rope_head_dim = bench.Size(64, 8),
                .v_head_dim = bench.Size(128, 16)};
  config.head_dim = config.mla->kv_lora_rank + config.mla->qk_rope_head_dim;
  config.value_dim = config.mla->kv_lora_rank;
  config.rotary_dim = config.mla->qk_rope_head_dim;
  config.attention_scale = 0.1F;
  config.vocab_size = bench.Size(1024, 64);
  config.max_position_embeddings = 131072;
  return config;
}

// A third of the layers of DeepSeek-V2-Lite: the first, which is dense, and eight with experts.
ModelConfig MoeConfigOf(const CudaBench& bench) {
  ModelConfig config = MlaConfigOf(bench);
  config.num_layers = bench.Size(9, 2);
  config.hidden_size = bench.Size(2048, 64);
  config.intermediate_size = bench.Size(10944, 64);
  config.num_q_heads = bench.Size(16, 8);
  config.mla->q_lora_rank = 0;
  config.vocab_size = bench.Size(102400, 64);
  MoeConfig moe = {.num_experts = bench.Size(64, 4),
                   .experts_per_token = bench.Size(6, 2),
                   .intermediate_size = bench.Size(1408, 16),
                   .shared_intermediate_size = bench.Size(2816, 32)};
  moe.layers.assign(config.num_layers, true);
  moe.layers[0] = false;
  config.moe = std::move(moe);
  return config;
}

}  // namespace

absl::Status MeasureSteps(CudaBench& bench) {
  const std::int32_t len = bench.Size(2048, 20);
  RETURN_IF_ERROR(MeasureModel(
      bench, {"8B GQA bf16", GqaConfig(bench)},
      {{1, len, 0.75}, {bench.Size(32, 2), len, 0.8}, {bench.Size(128, 3), len, 0.8}}));
  RETURN_IF_ERROR(MeasureModel(
      bench, {"DeepSeek-V2-Lite bf16, 9 of 27 layers", MoeConfigOf(bench)},
      {{1, len, 0.75}, {bench.Size(32, 2), len, 0.8}, {bench.Size(128, 3), len, 0.8}}));
  // The same attention of a rank of eight: all of each sequence's latents, or an eighth of them.
  const std::vector<Load> long_contexts = {{bench.Size(64, 2), bench.Size(8192, 40), 0.6}};
  RETURN_IF_ERROR(
      MeasureModel(bench, {"MLA, a rank of TP8", MlaConfigOf(bench), 8, 1}, long_contexts));
  return MeasureModel(bench, {"MLA, a rank of TP8 x N8", MlaConfigOf(bench), 8, 8}, long_contexts);
}

}  // namespace weft::bench
