// Kernels one by one, at the shapes of models that are served.

#include <numeric>

#include "fmt/format.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/kv_append.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/lse_merge.h"
#include "server/base/status_macros.h"
#include "tests/bench/cuda_bench.h"

namespace weft::bench {
namespace {

using kernels::cuda::BFloat16;
using kernels::cuda::StatusOf;

constexpr double kBf16 = 2;

struct AttentionShape {
  std::string_view name;
  std::int32_t num_seqs;
  std::int32_t len;  // of each, on this rank
  std::int32_t num_q_heads;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t value_dim;  // less than head_dim: latents
  double share;
};

absl::Status MeasureAttention(CudaBench& bench, std::string_view group, AttentionShape shape) {
  const bool latent = shape.value_dim < shape.head_dim;
  shape.num_seqs = bench.Size(shape.num_seqs, 2);
  shape.len = bench.Size(shape.len, 40);
  constexpr std::int32_t kBlockTokens = 64;
  const std::int32_t blocks_of_each = (shape.len + kBlockTokens - 1) / kBlockTokens;
  const std::int32_t num_blocks = blocks_of_each * shape.num_seqs;
  const std::int64_t plane = std::int64_t{num_blocks} * shape.num_kv_heads * kBlockTokens *
                             shape.head_dim * std::int64_t{sizeof(BFloat16)};
  const std::int64_t q_heads = std::int64_t{shape.num_seqs} * shape.num_q_heads;
  ASSIGN_OR_RETURN(std::byte * k, bench.Zeros(plane));
  std::byte* v = nullptr;
  if (!latent) {
    ASSIGN_OR_RETURN(v, bench.Zeros(plane));
  }
  ASSIGN_OR_RETURN(std::byte * q, bench.Zeros(q_heads * shape.head_dim * 2));
  ASSIGN_OR_RETURN(std::byte * out, bench.Zeros(q_heads * shape.value_dim * 2));
  ASSIGN_OR_RETURN(std::byte * lse, bench.Zeros(q_heads * 4));
  ASSIGN_OR_RETURN(std::byte * workspace,
                   bench.Zeros(kernels::cuda::GqaAttentionWorkspaceBytes(
                       shape.num_seqs, shape.num_q_heads, shape.value_dim, shape.len)));
  // Blocks of the pool in no order, as they are after some serving.
  std::vector<std::int32_t> table(num_blocks);
  for (std::int32_t i = 0; i < num_blocks; ++i) {
    table[i] = static_cast<std::int32_t>(std::int64_t{i} * 7919 % num_blocks);
  }
  if (num_blocks % 7919 == 0) std::iota(table.begin(), table.end(), 0);
  std::vector<std::int32_t> slots(shape.num_seqs);
  std::iota(slots.begin(), slots.end(), 0);
  ASSIGN_OR_RETURN(const std::int32_t* block_table, bench.Indices(table));
  ASSIGN_OR_RETURN(const std::int32_t* row_slot, bench.Indices(slots));
  ASSIGN_OR_RETURN(const std::int32_t* first,
                   bench.Indices(std::vector<std::int32_t>(shape.num_seqs, 0)));
  ASSIGN_OR_RETURN(const std::int32_t* len,
                   bench.Indices(std::vector<std::int32_t>(shape.num_seqs, shape.len)));
  const kernels::cuda::GqaAttentionParams<BFloat16> params = {
      .q = reinterpret_cast<const BFloat16*>(q),
      .out = reinterpret_cast<BFloat16*>(out),
      .geometry = {.q = nullptr,
                   .k_blocks = k,
                   .v_blocks = v,
                   .block_table = block_table,
                   .row_slot = row_slot,
                   .first_visible = first,
                   .visible_len = len,
                   .out = nullptr,
                   .lse = reinterpret_cast<float*>(lse),
                   .num_rows = shape.num_seqs,
                   .num_q_heads = shape.num_q_heads,
                   .num_kv_heads = shape.num_kv_heads,
                   .first_q_head = 0,
                   .first_kv_head = 0,
                   .q_per_kv = shape.num_q_heads / shape.num_kv_heads,
                   .head_dim = shape.head_dim,
                   .value_dim = shape.value_dim,
                   .block_tokens_per_rank = kBlockTokens,
                   .max_blocks_per_seq = blocks_of_each,
                   .kv_dtype = DType::kBFloat16,
                   .scale = 0.1F},
      .max_visible_len = shape.len};
  ASSIGN_OR_RETURN(const double seconds, bench.Seconds([&] {
    return kernels::cuda::GqaAttention<BFloat16>(params, workspace, bench.stream());
  }));
  const double tokens = static_cast<double>(shape.num_seqs) * shape.len;
  const double width = latent ? shape.head_dim : 2.0 * shape.head_dim;
  bench.Report(group, shape.name, seconds, tokens * shape.num_kv_heads * width * kBf16,
               tokens * shape.num_q_heads * 2 * (shape.head_dim + shape.value_dim), shape.share);
  bench.FreeAll();
  return absl::OkStatus();
}

}  // namespace

absl::Status MeasurePeaks(CudaBench& bench) {
  const std::int64_t bytes = bench.dry_run() ? 1 << 16 : std::int64_t{2} << 30;  // read and written
  ASSIGN_OR_RETURN(std::byte * from, bench.Zeros(bytes));
  ASSIGN_OR_RETURN(std::byte * to, bench.Zeros(bytes));
  ASSIGN_OR_RETURN(const double copy, bench.Seconds([&] {
    return StatusOf(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes),
                                    cudaMemcpyDeviceToDevice, bench.stream().handle()),
                    "cudaMemcpyAsync");
  }));
  bench.FreeAll();
  const std::int32_t n = bench.Size(8192, 16);
  ASSIGN_OR_RETURN(auto matmul, kernels::cuda::Matmul::Create());
  ASSIGN_OR_RETURN(std::byte * x, bench.Zeros(std::int64_t{n} * n * 2));
  ASSIGN_OR_RETURN(std::byte * weight, bench.Zeros(std::int64_t{n} * n * 2));
  ASSIGN_OR_RETURN(std::byte * y, bench.Zeros(std::int64_t{n} * n * 4));
  ASSIGN_OR_RETURN(const double product, bench.Seconds([&] {
    return matmul->Run({.x = x,
                        .weight = weight,
                        .bias = nullptr,
                        .residual = nullptr,
                        .y = reinterpret_cast<float*>(y),
                        .num_rows = n,
                        .in_features = n,
                        .out_features = n,
                        .x_stride = n,
                        .y_stride = n,
                        .dtype = DType::kBFloat16},
                       bench.stream());
  }));
  bench.FreeAll();
  bench.Print({{"group", "peaks"},
               {"copy_bytes_per_s", 2.0 * static_cast<double>(bytes) / copy},
               {"bf16_flops", 2.0 * n * n * n / product}});
  return absl::OkStatus();
}

absl::Status MeasureGqa(CudaBench& bench) {
  for (const AttentionShape& shape :
       {AttentionShape{"b64 8K, 64/8 heads of 128", 64, 8192, 64, 8, 128, 128, 0.85},
        AttentionShape{"b1 128K, 32/4 heads of 128", 1, 131072, 32, 4, 128, 128, 0.6},
        AttentionShape{"b64 4K, 64/8 heads of 128: a rank of N=2", 64, 4096, 64, 8, 128, 128, 0.85},
        AttentionShape{"b64 8K, 32/8 heads of 64", 64, 8192, 32, 8, 64, 64, 0.85}}) {
    RETURN_IF_ERROR(MeasureAttention(bench, "gqa", shape));
  }
  return absl::OkStatus();
}

absl::Status MeasureMla(CudaBench& bench) {
  for (const AttentionShape& shape :
       {AttentionShape{"b128 8K, 8 heads", 128, 8192, 8, 1, 576, 512, 0.8},
        AttentionShape{"b128 1K, 64 heads: Kimi K2, a rank of N=8", 128, 1024, 64, 1, 576, 512,
                       0.6},
        AttentionShape{"b128 1K, 128 heads: R1", 128, 1024, 128, 1, 576, 512, 0.6}}) {
    RETURN_IF_ERROR(MeasureAttention(bench, "mla", shape));
  }
  return absl::OkStatus();
}

absl::Status MeasureMerge(CudaBench& bench) {
  constexpr std::int32_t kParts = 8, kHeads = 8, kDim = 512;
  for (const std::int32_t real : {64, 512}) {
    const std::int32_t rows = bench.Size(real, 2);
    const std::int64_t heads = std::int64_t{rows} * kHeads;
    ASSIGN_OR_RETURN(std::byte * parts, bench.Zeros(kParts * heads * kDim * 4));
    ASSIGN_OR_RETURN(std::byte * lse, bench.Zeros(kParts * heads * 4));
    ASSIGN_OR_RETURN(std::byte * out, bench.Zeros(heads * kDim * 4));
    ASSIGN_OR_RETURN(const double seconds, bench.Seconds([&] {
      return kernels::cuda::LseMerge<float>({.parts = reinterpret_cast<const float*>(parts),
                                             .lse = reinterpret_cast<const float*>(lse),
                                             .part_stride = heads * kDim,
                                             .lse_stride = heads,
                                             .out = reinterpret_cast<float*>(out),
                                             .merged_lse = nullptr,
                                             .num_parts = kParts,
                                             .num_rows = rows,
                                             .num_heads = kHeads,
                                             .padded_heads = kHeads,
                                             .head_dim = kDim},
                                            bench.stream());
    }));
    // 4 us, or 1.3 times its floor.
    const double bytes = static_cast<double>(heads) * kDim * 4 * (kParts + 1);
    const double floor = bench.copy_bytes_per_s > 0 ? bytes / bench.copy_bytes_per_s : 0;
    bench.Report("merge", fmt::format("b{}, 8 parts, 8 heads of 512", rows), seconds, bytes, 0,
                 std::min(1 / 1.3, floor / 4e-6));
    bench.FreeAll();
  }
  double of_whole = 0;  // I = 64
  for (const std::int32_t interleave : {64, 1}) {
    const std::int32_t rows = bench.Size(8192, 64) / 8;
    constexpr std::int32_t kKvHeads = 8, kHeadDim = 128, kBlockTokens = 64;
    const std::int32_t blocks = (rows + kBlockTokens - 1) / kBlockTokens + 8;
    const std::int64_t row_values = kKvHeads * kHeadDim;
    ASSIGN_OR_RETURN(std::byte * kv, bench.Zeros(2 * rows * row_values * 2));
    ASSIGN_OR_RETURN(std::byte * pool, bench.Zeros(2 * blocks * kBlockTokens * row_values * 2));
    // Of 8,192 tokens this rank keeps every eighth, or every eighth run of 64.
    std::vector<std::int32_t> slots(2 * rows);  // of 64 bits
    for (std::int32_t i = 0; i < rows; ++i) {
      slots[2 * i] = interleave == 1 ? static_cast<std::int32_t>(std::int64_t{i} * 509 % rows) : i;
    }
    ASSIGN_OR_RETURN(const std::int32_t* on_device, bench.Indices(slots));
    auto* values = reinterpret_cast<BFloat16*>(kv);
    ASSIGN_OR_RETURN(const double seconds, bench.Seconds([&] {
      return kernels::cuda::KvAppend<BFloat16>(
          {.k = values,
           .v = values + rows * row_values,
           .slots = reinterpret_cast<const std::int64_t*>(on_device),
           .k_blocks = pool,
           .v_blocks = pool + blocks * kBlockTokens * row_values * 2,
           .num_rows = rows,
           .num_kv_heads = kKvHeads,
           .head_dim = kHeadDim,
           .block_tokens_per_rank = kBlockTokens,
           .kv_stride = row_values,
           .kv_dtype = DType::kBFloat16},
          bench.stream());
    }));
    if (interleave == 64) of_whole = seconds;
    const bool pass = bench.dry_run() || seconds <= 1.5 * of_whole;
    bench.all_pass &= pass;
    bench.Print({{"group", "merge"},
                 {"name", fmt::format("append, I={}", interleave)},
                 {"us", seconds * 1e6},
                 {"times_whole", seconds / of_whole},
                 {"wanted", 1.5},
                 {"pass", pass}});
    bench.FreeAll();
  }
  return absl::OkStatus();
}

}  // namespace weft::bench
