// Speed of the kernels on the shapes of SmolLM2-135M, with its share of what this machine gives
// at that moment (machine_limits.h). `best` figures are of the fastest iteration: machines are
// shared. Threads: WEFT_BENCH_THREADS, default 2.

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/attention.h"
#include "kernels/device/cpu_target.h"
#include "kernels/elementwise.h"
#include "kernels/gumbel_argmax.h"
#include "kernels/linear.h"
#include "server/base/check.h"
#include "tests/bench/machine_limits.h"

namespace weft::kernels {
namespace {

constexpr std::int32_t kHidden = 576;
constexpr std::int32_t kHeads = 9;
constexpr std::int32_t kKvHeads = 3;
constexpr std::int32_t kHeadDim = 64;
constexpr std::int32_t kIntermediate = 1536;
constexpr std::int32_t kLayers = 30;
constexpr std::int32_t kVocab = 49152;
constexpr std::int32_t kBlockTokens = 128;

CpuStream& BenchStream() {
  static CpuStream stream([] {
    const char* threads = std::getenv("WEFT_BENCH_THREADS");
    return threads == nullptr ? 2 : std::atoi(threads);
  }());
  return stream;
}

std::vector<float> RandomFloats(std::int64_t count, float scale) {
  std::minstd_rand rng(static_cast<unsigned>(count));
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(rng);
  return values;
}

PackedMatrix RandomWeight(std::int32_t out, std::int32_t in, WeightFormat format) {
  const std::vector<float> values = RandomFloats(std::int64_t{out} * in, 0.05F);
  const MatrixView view = {values.data(), DType::kFloat32, out, in, in};
  return *PackedMatrix::Pack({&view, 1}, format, BenchStream());
}

PackedMatrix RandomGatedWeight(std::int32_t out, std::int32_t in, WeightFormat format) {
  const std::vector<float> values = RandomFloats(std::int64_t{2} * out * in, 0.05F);
  const MatrixView gate = {values.data(), DType::kFloat32, out, in, in};
  const MatrixView up = {values.data() + std::int64_t{out} * in, DType::kFloat32, out, in, in};
  return *PackedMatrix::PackGated(gate, up, format, BenchStream());
}

// Times iterations by hand and reports the best of them against the limits.
class Meter {
 public:
  // `format`: what its products multiply.
  explicit Meter(benchmark::State& state, WeightFormat format = WeightFormat::kFloat32)
      : state_(state), format_(format) {}

  template <typename Body>
  void Run(double flops, double bytes, double tokens, const Body& body) {
    const MachineLimits limits = MeasureMachineLimits(BenchStream());
    for (auto _ : state_) {
      const double start = NowSeconds(BenchStream());
      body();
      const double seconds = NowSeconds(BenchStream()) - start;
      state_.SetIterationTime(seconds);
      best_ = std::min(best_, seconds);
    }
    const MachineLimits after = MeasureMachineLimits(BenchStream());
    const double peak = std::max(limits.PeakOf(format_), after.PeakOf(format_));
    const double bandwidth = std::max(limits.bytes_per_second, after.bytes_per_second);
    // The slower of the two limits is what cannot be beaten.
    const double bound = std::max(flops / peak, bytes / bandwidth);
    state_.counters["GFLOP/s"] = flops / best_ * 1e-9;
    state_.counters["of_peak"] = flops / best_ / peak;
    state_.counters["GB/s"] = bytes / best_ * 1e-9;
    state_.counters["of_bandwidth"] = bytes / best_ / bandwidth;
    state_.counters["of_limit"] = bound / best_;
    if (tokens > 0) state_.counters["tok/s"] = tokens / best_;
    state_.SetLabel(std::string(CpuTargetName()));
  }

 private:
  benchmark::State& state_;
  WeightFormat format_;
  double best_ = 1e30;
};

DType DTypeArg(std::int64_t arg) { return static_cast<DType>(arg); }
WeightFormat FormatArg(std::int64_t arg) { return static_cast<WeightFormat>(arg); }

// Args: weight format, rows, out, in. Copies enough to exceed the caches stand for the layers.
void BM_Linear(benchmark::State& state) {
  const WeightFormat format = FormatArg(state.range(0));
  const auto rows = static_cast<std::int32_t>(state.range(1));
  const auto out = static_cast<std::int32_t>(state.range(2));
  const auto in = static_cast<std::int32_t>(state.range(3));
  std::vector<PackedMatrix> weights;
  weights.push_back(RandomWeight(out, in, format));
  const auto bytes = static_cast<double>(weights[0].size_bytes());
  const int copies = rows >= 64 ? 1 : static_cast<int>(1e8 / bytes) + 1;
  while (static_cast<int>(weights.size()) < copies) {
    weights.push_back(RandomWeight(out, in, format));
  }
  const std::vector<float> x = RandomFloats(std::int64_t{rows} * in, 1.0F);
  const Buffer y = *Buffer::Allocate(std::int64_t{4} * rows * out);  // aligned, as the engine's
  Meter(state, format).Run(2.0 * rows * out * in * copies, bytes * copies, 0, [&] {
    for (const PackedMatrix& weight : weights) {
      CHECK(Linear({.x = x.data(),
                    .weight = &weight,
                    .y = y.as<float>(),
                    .num_rows = rows,
                    .x_stride = in,
                    .y_stride = out},
                   BenchStream())
                .ok());
    }
  });
}

// Keys and values of `num_seqs` sequences of `context_len` tokens for one layer.
struct KvPool {
  Buffer k;
  Buffer v;
  std::vector<std::int32_t> block_table;
  std::int32_t blocks_per_seq;
  std::int32_t kv_heads;
  DType dtype;

  KvPool(std::int32_t num_seqs, std::int32_t context_len, std::int32_t kv_heads, DType dtype)
      : blocks_per_seq(context_len / kBlockTokens + 1), kv_heads(kv_heads), dtype(dtype) {
    const std::int64_t blocks = std::int64_t{num_seqs} * blocks_per_seq;
    const std::int64_t bytes = blocks * kv_heads * kBlockTokens * kHeadDim * DTypeBytes(dtype);
    k = *Buffer::Allocate(bytes);
    v = *Buffer::Allocate(bytes);
    // 0x3C3C is a small positive number in all types.
    std::fill_n(k.as<std::uint8_t>(), bytes, 0x3C);
    std::fill_n(v.as<std::uint8_t>(), bytes, 0x3C);
    for (std::int32_t i = 0; i < blocks; ++i) block_table.push_back(i);
    std::shuffle(block_table.begin(), block_table.end(), std::minstd_rand(1));
  }
};

// Rows of a step: `rows_per_seq` rows at the end of each sequence's context.
struct Rows {
  std::vector<std::int32_t> slot;
  std::vector<std::int32_t> first_visible;
  std::vector<std::int32_t> visible_len;
  std::vector<std::int64_t> kv_slots;

  Rows(const KvPool& pool, std::int32_t num_seqs, std::int32_t context_len,
       std::int32_t rows_per_seq) {
    for (std::int32_t seq = 0; seq < num_seqs; ++seq) {
      for (std::int32_t row = 0; row < rows_per_seq; ++row) {
        const std::int32_t position = context_len - rows_per_seq + row;
        slot.push_back(seq);
        first_visible.push_back(0);
        visible_len.push_back(position + 1);
        const std::int32_t block =
            pool.block_table[seq * pool.blocks_per_seq + position / kBlockTokens];
        kv_slots.push_back(std::int64_t{block} * kBlockTokens + position % kBlockTokens);
      }
    }
  }
  std::int32_t size() const { return static_cast<std::int32_t>(slot.size()); }
};

GqaAttentionParams AttentionOf(const KvPool& pool, const Rows& rows, bool round, const float* q,
                               float* out, float* lse) {
  return {.q = q,
          .k_blocks = pool.k.data(),
          .v_blocks = pool.v.data(),
          .block_table = pool.block_table.data(),
          .row_slot = rows.slot.data(),
          .first_visible = rows.first_visible.data(),
          .visible_len = rows.visible_len.data(),
          .out = out,
          .lse = lse,
          .num_rows = rows.size(),
          .num_q_heads = kHeads,
          .num_kv_heads = pool.kv_heads,
          .first_q_head = 0,
          .first_kv_head = 0,
          .q_per_kv = kHeads / pool.kv_heads,
          .head_dim = kHeadDim,
          .value_dim = kHeadDim,
          .block_tokens_per_rank = kBlockTokens,
          .max_blocks_per_seq = pool.blocks_per_seq,
          .kv_dtype = pool.dtype,
          .scale = 0.125F,
          .round_to_bfloat16 = round};
}

// Args: dtype, sequences, context, rows a sequence, KV heads, whether to round to bfloat16. Several
// layers' pools exceed the caches.
void BM_Attention(benchmark::State& state) {
  const DType dtype = DTypeArg(state.range(0));
  const auto seqs = static_cast<std::int32_t>(state.range(1));
  const auto context = static_cast<std::int32_t>(state.range(2));
  const auto rows_per_seq = static_cast<std::int32_t>(state.range(3));
  const auto kv_heads = static_cast<std::int32_t>(state.range(4));
  const bool round = state.range(5) != 0;
  const double bytes = 2.0 * seqs * context * kv_heads * kHeadDim * DTypeBytes(dtype);
  const int layers = rows_per_seq > 1 ? 1 : static_cast<int>(1e8 / bytes) + 1;
  std::vector<KvPool> pools;
  for (int i = 0; i < layers; ++i) pools.emplace_back(seqs, context, kv_heads, dtype);
  const Rows rows(pools[0], seqs, context, rows_per_seq);
  const std::vector<float> q = RandomFloats(std::int64_t{rows.size()} * kHeads * kHeadDim, 1.0F);
  std::vector<float> out(q.size());
  std::vector<float> lse(static_cast<std::size_t>(rows.size()) * kHeads);
  const Buffer workspace = *Buffer::Allocate(
      GqaAttentionWorkspaceBytes(rows.size(), kHeads, kHeadDim, kHeadDim, BenchStream()));
  double keys = 0;
  for (const std::int32_t visible : rows.visible_len) keys += visible;
  Meter(state, round ? WeightFormat::kBFloat16 : WeightFormat::kFloat32)
      .Run(4.0 * keys * kHeads * kHeadDim * layers, bytes * layers, 0, [&] {
        for (const KvPool& pool : pools) {
          CHECK(GqaAttention(AttentionOf(pool, rows, round, q.data(), out.data(), lse.data()),
                             workspace.data(), BenchStream())
                    .ok());
        }
      });
}

// Args: rows; temperature 1.
void BM_GumbelArgmax(benchmark::State& state) {
  const auto rows = static_cast<std::int32_t>(state.range(0));
  const std::vector<float> logits = RandomFloats(std::int64_t{rows} * kVocab, 5.0F);
  const std::vector<float> temperature(rows, static_cast<float>(state.range(1)));
  const std::vector<std::uint64_t> seed(rows, 3);
  const std::vector<std::int64_t> position(rows, 9);
  std::vector<ArgmaxResult> out(rows);
  Meter(state).Run(0, 4.0 * rows * kVocab, rows, [&] {
    CHECK(GumbelArgmax({.logits = logits.data(),
                        .temperature = temperature.data(),
                        .seed = seed.data(),
                        .position = position.data(),
                        .out = out.data(),
                        .logits_stride = kVocab,
                        .num_rows = rows,
                        .vocab_size = kVocab,
                        .first_token_id = 0},
                       BenchStream())
              .ok());
  });
}

// The whole model with made-up weights: every launch of a step, nothing else.
struct Model {
  struct Layer {
    PackedMatrix qkv, o, gate_up, down;
  };
  std::vector<Layer> layers;
  PackedMatrix head;
  std::vector<float> norm = std::vector<float>(kHidden, 1.0F);
  double bytes = 0;

  explicit Model(WeightFormat format) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back({RandomWeight((kHeads + 2 * kKvHeads) * kHeadDim, kHidden, format),
                        RandomWeight(kHidden, kHeads * kHeadDim, format),
                        RandomGatedWeight(kIntermediate, kHidden, format),
                        RandomWeight(kHidden, kIntermediate, format)});
      const Layer& layer = layers.back();
      for (const PackedMatrix* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
        bytes += static_cast<double>(weight->size_bytes());
      }
    }
    head =
        RandomWeight(kVocab, kHidden, format == WeightFormat::kInt4 ? WeightFormat::kInt8 : format);
    bytes += static_cast<double>(head.size_bytes());
  }
};

// Args: weight format, sequences, context, rows a sequence. The logits are of one row a sequence.
// KV is float16.
void BM_Model(benchmark::State& state) {
  const auto seqs = static_cast<std::int32_t>(state.range(1));
  const auto context = static_cast<std::int32_t>(state.range(2));
  const auto rows_per_seq = static_cast<std::int32_t>(state.range(3));
  const WeightFormat format = FormatArg(state.range(0));
  const bool round = format != WeightFormat::kFloat32 && format != WeightFormat::kFloat16;
  static std::vector<std::unique_ptr<Model>> models(5);
  std::unique_ptr<Model>& model = models[static_cast<std::size_t>(state.range(0))];
  if (model == nullptr) model = std::make_unique<Model>(format);
  std::vector<KvPool> pools;
  for (int i = 0; i < kLayers; ++i) pools.emplace_back(seqs, context, kKvHeads, DType::kFloat16);
  const Rows rows(pools[0], seqs, context, rows_per_seq);
  const std::int32_t n = rows.size();
  constexpr std::int32_t kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;
  const auto floats = [&](std::int64_t count) { return RandomFloats(n * count, 1.0F); };
  std::vector<float> x = floats(kHidden), normed = floats(kHidden), qkv = floats(kQkv);
  std::vector<float> q = floats(kHeads * kHeadDim), out = q;
  std::vector<float> act = floats(kIntermediate), lse = floats(kHeads);
  std::vector<float> cos = floats(kHeadDim / 2), sin = floats(kHeadDim / 2);
  std::vector<float> logits(static_cast<std::size_t>(seqs) * kVocab);
  const std::vector<float> temperature(seqs, 0.0F);
  const std::vector<std::uint64_t> seed(seqs, 3);
  const std::vector<std::int64_t> position(seqs, 9);
  std::vector<ArgmaxResult> tokens(seqs);
  const Buffer workspace =
      *Buffer::Allocate(GqaAttentionWorkspaceBytes(n, kHeads, kHeadDim, kHeadDim, BenchStream()));
  CpuStream& stream = BenchStream();
  const auto linear = [&](const PackedMatrix& weight, const float* in, float* y,
                          const float* residual, std::int32_t num_rows) {
    CHECK(Linear({.x = in,
                  .weight = &weight,
                  .residual = residual,
                  .y = y,
                  .num_rows = num_rows,
                  .x_stride = weight.in_features(),
                  .y_stride = weight.product_features()},
                 stream)
              .ok());
  };
  const auto norm = [&] {
    CHECK(RmsNorm({.x = x.data(),
                   .weight = model->norm.data(),
                   .out = normed.data(),
                   .num_rows = n,
                   .size = kHidden,
                   .eps = 1e-5F},
                  stream)
              .ok());
  };
  double keys = 0;
  for (const std::int32_t visible : rows.visible_len) keys += visible;
  const double flops = 2.0 * n * 106.2e6 + 2.0 * seqs * 28.3e6 + 4.0 * keys * kHidden * kLayers;
  const double kv_bytes = 23040.0 * seqs * context;
  Meter(state, FormatArg(state.range(0))).Run(flops, model->bytes + kv_bytes, n, [&] {
    for (int i = 0; i < kLayers; ++i) {
      const Model::Layer& layer = model->layers[i];
      norm();
      linear(layer.qkv, normed.data(), qkv.data(), nullptr, n);
      CHECK(Rope({.x = qkv.data(),
                  .cos = cos.data(),
                  .sin = sin.data(),
                  .num_rows = n,
                  .num_heads = kHeads + kKvHeads,
                  .head_dim = kHeadDim,
                  .row_stride = kQkv},
                 stream)
                .ok());
      CHECK(KvAppend({.k = qkv.data() + kHidden,
                      .v = qkv.data() + kHidden + kKvHeads * kHeadDim,
                      .slots = rows.kv_slots.data(),
                      .k_blocks = pools[i].k.data(),
                      .v_blocks = pools[i].v.data(),
                      .num_rows = n,
                      .num_kv_heads = kKvHeads,
                      .head_dim = kHeadDim,
                      .block_tokens_per_rank = kBlockTokens,
                      .kv_stride = kQkv,
                      .kv_dtype = DType::kFloat16},
                     stream)
                .ok());
      CHECK(GqaAttention(AttentionOf(pools[i], rows, round, q.data(), out.data(), lse.data()),
                         workspace.data(), stream)
                .ok());
      linear(layer.o, out.data(), x.data(), x.data(), n);
      norm();
      linear(layer.gate_up, normed.data(), act.data(), nullptr, n);
      linear(layer.down, act.data(), x.data(), x.data(), n);
    }
    linear(model->head, x.data(), logits.data(), nullptr, seqs);
    CHECK(GumbelArgmax({.logits = logits.data(),
                        .temperature = temperature.data(),
                        .seed = seed.data(),
                        .position = position.data(),
                        .out = tokens.data(),
                        .logits_stride = kVocab,
                        .num_rows = seqs,
                        .vocab_size = kVocab,
                        .first_token_id = 0},
                       stream)
              .ok());
  });
}

void LinearShapes(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t format : {0, 1, 2, 3, 4}) {
    for (const std::int64_t rows : {1, 2, 4, 8, 16, 64, 512}) {
      bench->Args({format, rows, 2 * kIntermediate, kHidden});
      bench->Args({format, rows, kHidden, kIntermediate});
    }
  }
}

void AttentionShapes(benchmark::internal::Benchmark* bench) {
  for (const auto& [dtype, round] :
       {std::pair(0, 0), std::pair(1, 0), std::pair(1, 1), std::pair(2, 0), std::pair(2, 1)}) {
    for (const std::int64_t seqs : {1, 8}) {
      for (const std::int64_t context : {128, 2048, 16384}) {
        bench->Args({dtype, seqs, context, 1, kKvHeads, round});
      }
    }
    bench->Args({dtype, 8, 16384, 1, 1, round});
    for (const std::int64_t context : {512, 4096}) {
      bench->Args({dtype, 1, context, 256, kKvHeads, round});
    }
  }
}

void ModelShapes(benchmark::internal::Benchmark* bench) {
  for (const std::int64_t format : {1, 2, 0, 3, 4}) {
    for (const std::int64_t seqs : {1, 2, 4, 8, 16, 32, 64}) bench->Args({format, seqs, 128, 1});
    bench->Args({format, 1, 2048, 1});
    bench->Args({format, 8, 1024, 1});
    bench->Args({format, 1, 512, 512});
    bench->Args({format, 1, 2048, 256});
  }
}

BENCHMARK(BM_Linear)->Apply(LinearShapes)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Attention)->Apply(AttentionShapes)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(BM_GumbelArgmax)
    ->ArgsProduct({{1, 8, 64}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Model)->Apply(ModelShapes)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace weft::kernels

BENCHMARK_MAIN();
