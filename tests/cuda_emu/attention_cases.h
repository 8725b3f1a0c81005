#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/device/buffer.h"
#include "tests/cuda_emu/cuda_test.h"

// Attention over a paged cache, on the CPU and on the GPU.

namespace weft::kernels::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  std::int32_t num_q_heads;
  std::int32_t num_kv_heads;
  std::int32_t first_q_head;
  std::int32_t first_kv_head;
  std::int32_t q_per_kv;
  std::int32_t head_dim;
  std::int32_t block_tokens;
  DType dtype;
  std::int32_t latent_dim = 0;  // 0: K and V apart

  std::int32_t value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

// Sequences of one cache, kept for the CPU and for the GPU, and rows that attend to them.
struct Case {
  Shape shape;
  std::vector<std::int32_t> lengths;
  std::int32_t max_blocks = 1;
  std::int32_t num_blocks = 0;
  std::vector<std::int32_t> block_table;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<std::int64_t> slots;
  std::vector<std::int32_t> row_slot;
  std::vector<std::int32_t> first_visible;
  std::vector<std::int32_t> visible_len;
  std::vector<float> q;

  Case(Rng& rng, const Shape& of, std::vector<std::int32_t> of_lengths)
      : shape(of), lengths(std::move(of_lengths)) {
    for (const std::int32_t length : lengths) {
      max_blocks = std::max(max_blocks, length / shape.block_tokens + 1);
    }
    num_blocks = 2 + max_blocks * static_cast<std::int32_t>(lengths.size());
    std::vector<std::int32_t> free_blocks(num_blocks);
    for (std::int32_t i = 0; i < num_blocks; ++i) free_blocks[i] = i;
    std::shuffle(free_blocks.begin(), free_blocks.end(), rng);
    for (const std::int32_t length : lengths) {
      const std::size_t first = block_table.size();
      for (std::int32_t i = 0; i < max_blocks; ++i) {
        const bool used = i * shape.block_tokens < length;
        block_table.push_back(used ? free_blocks.back() : 1 << 30);  // who reads that crashes
        if (used) free_blocks.pop_back();
      }
      for (std::int32_t token = 0; token < length; ++token) {
        slots.push_back(std::int64_t{block_table[first + token / shape.block_tokens]} *
                            shape.block_tokens +
                        token % shape.block_tokens);
      }
    }
    const std::int64_t width = std::int64_t{shape.num_kv_heads} * shape.head_dim;
    k = RandomFloats(rng, static_cast<std::int64_t>(slots.size()) * width, 1.5F);
    v = RandomFloats(rng, static_cast<std::int64_t>(slots.size()) * width);
  }

  void AddRow(Rng& rng, std::int32_t seq, std::int32_t first, std::int32_t len) {
    row_slot.push_back(seq);
    first_visible.push_back(first);
    visible_len.push_back(len);
    const auto row = RandomFloats(rng, std::int64_t{shape.num_q_heads} * shape.head_dim, 1.5F);
    q.insert(q.end(), row.begin(), row.end());
  }

  kernels::GqaAttentionParams Geometry() const {
    return {.num_rows = static_cast<std::int32_t>(row_slot.size()),
            .num_q_heads = shape.num_q_heads,
            .num_kv_heads = shape.num_kv_heads,
            .first_q_head = shape.first_q_head,
            .first_kv_head = shape.first_kv_head,
            .q_per_kv = shape.q_per_kv,
            .head_dim = shape.head_dim,
            .value_dim = shape.value_dim(),
            .block_tokens_per_rank = shape.block_tokens,
            .max_blocks_per_seq = max_blocks,
            .kv_dtype = shape.dtype,
            .scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim))};
  }
  std::size_t pool_bytes() const {
    return static_cast<std::size_t>(num_blocks) * shape.num_kv_heads * shape.block_tokens *
           shape.head_dim * DTypeBytes(shape.dtype);
  }
};

struct Result {
  std::vector<float> out;
  std::vector<float> lse;
};

inline Result OnCpu(Case& attention, CpuStream& cpu) {
  const Shape& shape = attention.shape;
  std::vector<std::byte> k_blocks(attention.pool_bytes(), std::byte{0xFF});
  std::vector<std::byte> v_blocks = k_blocks;
  EXPECT_TRUE(kernels::KvAppend({.k = attention.k.data(),
                                 .v = shape.latent_dim > 0 ? nullptr : attention.v.data(),
                                 .slots = attention.slots.data(),
                                 .k_blocks = k_blocks.data(),
                                 .v_blocks = v_blocks.data(),
                                 .num_rows = static_cast<std::int32_t>(attention.slots.size()),
                                 .num_kv_heads = shape.num_kv_heads,
                                 .head_dim = shape.head_dim,
                                 .block_tokens_per_rank = shape.block_tokens,
                                 .kv_stride = std::int64_t{shape.num_kv_heads} * shape.head_dim,
                                 .kv_dtype = shape.dtype},
                                cpu)
                  .ok());
  kernels::GqaAttentionParams params = attention.Geometry();
  Result result;
  result.out.resize(static_cast<std::size_t>(params.num_rows) * shape.num_q_heads *
                    shape.value_dim());
  result.lse.resize(static_cast<std::size_t>(params.num_rows) * shape.num_q_heads);
  params.q = attention.q.data();
  params.k_blocks = k_blocks.data();
  params.v_blocks = shape.latent_dim > 0 ? nullptr : v_blocks.data();
  params.block_table = attention.block_table.data();
  params.row_slot = attention.row_slot.data();
  params.first_visible = attention.first_visible.data();
  params.visible_len = attention.visible_len.data();
  params.out = result.out.data();
  params.lse = result.lse.data();
  auto workspace = Buffer::Allocate(kernels::GqaAttentionWorkspaceBytes(
      params.num_rows, shape.num_q_heads, shape.head_dim, shape.value_dim(), cpu));
  EXPECT_TRUE(workspace.ok());
  const absl::Status status = kernels::GqaAttention(params, workspace->data(), cpu);
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

// `max_visible_len` beyond what there is asks for more parts than the rows have.
template <typename T>
Result OnGpu(const Case& attention, std::int32_t max_visible_len, CudaStream& stream) {
  const Shape& shape = attention.shape;
  const std::vector<std::byte> unwritten(attention.pool_bytes(), std::byte{0xFF});
  const DeviceArray<std::byte> k_blocks(unwritten, stream);
  const DeviceArray<std::byte> v_blocks(unwritten, stream);
  const DeviceArray<float> k(attention.k, stream);
  const DeviceArray<float> v(attention.v, stream);
  const DeviceArray<std::int64_t> slots(attention.slots, stream);
  const std::int64_t kv_stride = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  const auto num_tokens = static_cast<std::int64_t>(attention.slots.size());
  // The race detector keeps track of all threads of a launch.
  const std::int64_t piece = kShrink == 1 ? num_tokens : 32;
  for (std::int64_t first = 0; first < num_tokens; first += piece) {
    EXPECT_TRUE(
        KvAppend<float>({.k = k.data() + first * kv_stride,
                         .v = shape.latent_dim > 0 ? nullptr : v.data() + first * kv_stride,
                         .slots = slots.data() + first,
                         .k_blocks = k_blocks.data(),
                         .v_blocks = v_blocks.data(),
                         .num_rows = static_cast<std::int32_t>(std::min(piece, num_tokens - first)),
                         .num_kv_heads = shape.num_kv_heads,
                         .head_dim = shape.head_dim,
                         .block_tokens_per_rank = shape.block_tokens,
                         .kv_stride = kv_stride,
                         .kv_dtype = shape.dtype},
                        stream)
            .ok());
  }
  GqaAttentionParams<T> params = {.geometry = attention.Geometry(),
                                  .max_visible_len = max_visible_len};
  kernels::GqaAttentionParams& g = params.geometry;
  const DeviceArray<T> q(Stored<T>(attention.q), stream);
  const DeviceArray<std::int32_t> block_table(attention.block_table, stream);
  const DeviceArray<std::int32_t> row_slot(attention.row_slot, stream);
  const DeviceArray<std::int32_t> first_visible(attention.first_visible, stream);
  const DeviceArray<std::int32_t> visible_len(attention.visible_len, stream);
  const DeviceArray<T> out(
      static_cast<std::size_t>(g.num_rows) * shape.num_q_heads * shape.value_dim(), stream);
  const DeviceArray<float> lse(static_cast<std::size_t>(g.num_rows) * shape.num_q_heads, stream);
  const DeviceArray<std::byte> workspace(
      static_cast<std::size_t>(GqaAttentionWorkspaceBytes(g.num_rows, shape.num_q_heads,
                                                          shape.value_dim(), max_visible_len)),
      stream);
  params.q = q.data();
  params.out = out.data();
  g.k_blocks = k_blocks.data();
  g.v_blocks = shape.latent_dim > 0 ? nullptr : v_blocks.data();
  g.block_table = block_table.data();
  g.row_slot = row_slot.data();
  g.first_visible = first_visible.data();
  g.visible_len = visible_len.data();
  g.lse = lse.data();
  const absl::Status status = GqaAttention(params, workspace.data(), stream);
  EXPECT_TRUE(status.ok()) << status;
  return {ReadFloats(out), lse.Read()};
}

template <typename T>
void ExpectSame(const Result& got, const Result& want) {
  ExpectClose<T>(got.out, want.out, 2e-5);
  ASSERT_EQ(got.lse.size(), want.lse.size());
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    if (want.lse[i] == -kInfinity) {
      ASSERT_EQ(got.lse[i], -kInfinity) << i;
    } else {
      ASSERT_NEAR(got.lse[i], want.lse[i], 2e-5) << i;
    }
  }
}

// A mix of decode rows, chunks of prompts, windows and rows that see nothing.
inline Case RandomCase(Rng& rng, const Shape& shape) {
  std::vector<std::int32_t> lengths;
  for (std::int32_t i = RandomInt(rng, 1, kShrink > 1 ? 1 : 2); i > 0; --i) {
    lengths.push_back(RandomInt(rng, 0, RandomInt(rng, 0, 3) == 0 ? 1300 / kShrink : 150));
  }
  Case attention(rng, shape, lengths);
  for (std::size_t seq = 0; seq < lengths.size(); ++seq) {
    const std::int32_t rows = RandomInt(rng, 0, 1) == 0 ? 1 : RandomInt(rng, 1, 4);
    const std::int32_t window = RandomInt(rng, 0, 2) == 0 ? RandomInt(rng, 1, 90) : 1 << 20;
    for (std::int32_t i = 0; i < rows; ++i) {
      const std::int32_t len = std::max(0, lengths[seq] - rows + 1 + i);
      attention.AddRow(rng, static_cast<std::int32_t>(seq), std::max(0, len - window), len);
    }
  }
  return attention;
}

}  // namespace weft::kernels::cuda
