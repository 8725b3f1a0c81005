#include "kernels/attention.h"

#include <limits>
#include <numbers>

#include "kernels/cpu/convert.h"
#include "kernels/device/buffer.h"
#include "tests/kernels/kernel_test.h"

namespace weft::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  std::int32_t num_q_heads;
  std::int32_t num_kv_heads;
  std::int32_t first_q_head;
  std::int32_t first_kv_head;
  std::int32_t q_per_kv;
  std::int32_t head_dim;
  std::int32_t block_tokens;
  DType dtype;
  std::int32_t latent_dim = 0;  // with latents, whose first dims are the values: how many of them
  bool round_to_bfloat16 = false;

  bool latent() const { return latent_dim > 0; }
  std::int32_t value_dim() const { return latent() ? latent_dim : head_dim; }
  bool rounds() const { return round_to_bfloat16 && !latent() && HasDotProducts(); }
};

float ToBFloat16(float value) {
  std::uint16_t bits = 0;
  StoreElement(&bits, 0, DType::kBFloat16, value);
  return LoadElement(&bits, 0, DType::kBFloat16);
}

// A weight as bfloat16. `slack`: what it may differ by, an ulp if a small error of the
// weight decides which way it is rounded.
double RoundedWeight(double weight, double& slack) {
  int exponent = 0;
  const double mantissa = std::ldexp(std::frexp(weight, &exponent), 8);
  const double whole = std::nearbyint(mantissa);
  const double ulp = std::ldexp(1.0, exponent - 8);
  const bool tie = std::abs(std::abs(mantissa - whole) - 0.5) < 0.02;
  slack = tie ? ulp : 0.0;
  return whole * ulp;
}

// Sequences of random lengths whose KV lies scattered over a pool that is NaN elsewhere, and rows
// that see parts of them.
struct Case {
  Shape shape;
  std::int32_t max_blocks = 0;
  std::vector<std::int32_t> lengths;
  std::vector<std::vector<float>> k;  // [seq][tokens, kv_heads, head_dim], as stored
  std::vector<std::vector<float>> v;
  std::vector<std::int32_t> block_table;
  std::vector<std::byte> k_blocks;
  std::vector<std::byte> v_blocks;
  std::vector<std::int32_t> row_slot;
  std::vector<std::int32_t> first_visible;
  std::vector<std::int32_t> visible_len;
  std::vector<float> q;
  float scale = 0.0F;

  Case(Rng& rng, const Shape& shape, std::vector<std::int32_t> sequence_lengths, CpuStream& stream)
      : shape(shape), lengths(std::move(sequence_lengths)) {
    scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
    std::int32_t num_blocks = 3;
    for (const std::int32_t length : lengths) {
      max_blocks = std::max(max_blocks, length / shape.block_tokens + 1);
    }
    num_blocks += max_blocks * static_cast<std::int32_t>(lengths.size());
    std::vector<std::int32_t> free_blocks(num_blocks);
    for (std::int32_t i = 0; i < num_blocks; ++i) free_blocks[i] = i;
    std::shuffle(free_blocks.begin(), free_blocks.end(), rng);
    const std::int64_t pool =
        std::int64_t{num_blocks} * shape.num_kv_heads * shape.block_tokens * shape.head_dim;
    k_blocks.assign(pool * DTypeBytes(shape.dtype), std::byte{0xFF});  // NaN in every type
    v_blocks = k_blocks;
    for (const std::int32_t length : lengths) AddSequence(rng, length, free_blocks, stream);
  }

  void AddSequence(Rng& rng, std::int32_t length, std::vector<std::int32_t>& free_blocks,
                   CpuStream& stream) {
    const std::int64_t row = std::int64_t{shape.num_kv_heads} * shape.head_dim;
    std::vector<float> new_k = RandomFloats(rng, length * row, 1.5F);
    std::vector<float> new_v = RandomFloats(rng, length * row);
    std::vector<std::int64_t> slots;
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
    EXPECT_TRUE(KvAppend({.k = new_k.data(),
                          .v = shape.latent() ? nullptr : new_v.data(),
                          .slots = slots.data(),
                          .k_blocks = k_blocks.data(),
                          .v_blocks = v_blocks.data(),
                          .num_rows = length,
                          .num_kv_heads = shape.num_kv_heads,
                          .head_dim = shape.head_dim,
                          .block_tokens_per_rank = shape.block_tokens,
                          .kv_stride = row,
                          .kv_dtype = shape.dtype},
                         stream)
                    .ok());
    for (std::vector<float>* values : {&new_k, &new_v}) {
      for (float& value : *values) {
        float bits = 0.0F;
        StoreElement(&bits, 0, shape.dtype, value);
        value = LoadElement(&bits, 0, shape.dtype);
      }
    }
    v.push_back(shape.latent() ? new_k : std::move(new_v));
    k.push_back(std::move(new_k));
  }

  void AddRow(Rng& rng, std::int32_t seq, std::int32_t first, std::int32_t len) {
    row_slot.push_back(seq);
    first_visible.push_back(first);
    visible_len.push_back(len);
    const std::vector<float> row =
        RandomFloats(rng, std::int64_t{shape.num_q_heads} * shape.head_dim, 1.5F);
    q.insert(q.end(), row.begin(), row.end());
  }

  struct Result {
    std::vector<float> out;
    std::vector<float> lse;
  };

  Result Run(CpuStream& stream) const { return Run(stream, 0, row_slot.size()); }

  Result Run(CpuStream& stream, std::size_t row, std::size_t count) const {
    Result result;
    const std::size_t row_floats = std::size_t(shape.num_q_heads) * shape.head_dim;
    result.out.assign(count * shape.num_q_heads * shape.value_dim(), -7.0F);
    result.lse.assign(count * shape.num_q_heads, -7.0F);
    absl::StatusOr<Buffer> workspace = Buffer::Allocate(
        GqaAttentionWorkspaceBytes(static_cast<std::int32_t>(count), shape.num_q_heads,
                                   shape.head_dim, shape.value_dim(), stream));
    EXPECT_TRUE(workspace.ok());
    const absl::Status status =
        GqaAttention({.q = q.data() + row * row_floats,
                      .k_blocks = k_blocks.data(),
                      .v_blocks = shape.latent() ? nullptr : v_blocks.data(),
                      .block_table = block_table.data(),
                      .row_slot = row_slot.data() + row,
                      .first_visible = first_visible.data() + row,
                      .visible_len = visible_len.data() + row,
                      .out = result.out.data(),
                      .lse = result.lse.data(),
                      .num_rows = static_cast<std::int32_t>(count),
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
                      .scale = scale,
                      .round_to_bfloat16 = shape.round_to_bfloat16},
                     workspace->data(), stream);
    EXPECT_TRUE(status.ok()) << status;
    return result;
  }

  void ExpectRight(const Result& result) const {
    for (std::size_t row = 0; row < row_slot.size(); ++row) {
      for (std::int32_t head = 0; head < shape.num_q_heads; ++head) {
        ExpectRight(result, row, head);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }

  // One long softmax in doubles.
  void ExpectRight(const Result& result, std::size_t row, std::int32_t head) const {
    const std::int32_t kv_head = (shape.first_q_head + head) / shape.q_per_kv - shape.first_kv_head;
    const std::size_t query = row * shape.num_q_heads + head;
    const auto rounded = [&](float value) { return shape.rounds() ? ToBFloat16(value) : value; };
    std::vector<double> row_q;
    for (std::int32_t i = 0; i < shape.head_dim; ++i) {
      const float value = q[query * shape.head_dim + i];
      // In base 2, so that rounding is as the kernel's.
      row_q.push_back(shape.rounds() ? ToBFloat16(value * (scale * std::numbers::log2e_v<float>)) *
                                           std::numbers::ln2
                                     : double{value} * scale);
    }
    const auto at = [&](const std::vector<std::vector<float>>& kv, std::int32_t token) {
      return kv[row_slot[row]].data() +
             (std::size_t(token) * shape.num_kv_heads + kv_head) * shape.head_dim;
    };
    std::vector<double> scores;
    for (std::int32_t token = first_visible[row]; token < visible_len[row]; ++token) {
      double score = 0.0;
      for (std::int32_t i = 0; i < shape.head_dim; ++i)
        score += row_q[i] * rounded(at(k, token)[i]);
      scores.push_back(score);
    }
    if (scores.empty()) {
      ASSERT_EQ(result.lse[query], -kInfinity);
      for (std::int32_t i = 0; i < shape.value_dim(); ++i) {
        ASSERT_EQ(result.out[query * shape.value_dim() + i], 0.0F);
      }
      return;
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double slack = 0.0;
    const std::vector<double> weights = Weights(scores, slack);
    double sum = 0.0;
    double largest = 0.0;
    std::vector<double> out(shape.value_dim());
    for (std::size_t i = 0; i < scores.size(); ++i) {
      sum += weights[i];
      const float* token_v = at(v, first_visible[row] + static_cast<std::int32_t>(i));
      for (std::int32_t j = 0; j < shape.value_dim(); ++j) {
        out[j] += weights[i] * rounded(token_v[j]);
        largest = std::max(largest, std::abs(double{token_v[j]}));
      }
    }
    const double allowed = shape.rounds() ? 5e-5 + slack / sum : 2e-5;
    ASSERT_NEAR(result.lse[query], max + std::log(sum), allowed)
        << "row " << row << " head " << head;
    for (std::int32_t i = 0; i < shape.value_dim(); ++i) {
      ASSERT_NEAR(result.out[query * shape.value_dim() + i], out[i] / sum,
                  shape.rounds() ? 5e-5 + 2 * largest * slack / sum : allowed)
          << "row " << row << " head " << head << " dim " << i;
    }
  }

  // Relative to the largest. Rounding is the same whatever power of two they are relative to.
  // `slack`: of all of them.
  std::vector<double> Weights(const std::vector<double>& scores, double& slack) const {
    const double max = *std::max_element(scores.begin(), scores.end());
    std::vector<double> weights;
    for (const double score : scores) {
      if (!shape.rounds()) {
        weights.push_back(std::exp(score - max));
        continue;
      }
      double ulp = 0.0;
      weights.push_back(RoundedWeight(std::exp(score), ulp) * std::exp(-max));
      slack += ulp * std::exp(-max);
    }
    return weights;
  }
};

// One latent a token for all heads, wider than any K.
void MakeLatent(Rng& rng, Shape& shape) {
  shape.num_kv_heads = 1;
  shape.first_kv_head = 0;
  shape.q_per_kv = 30;
  shape.head_dim = 8 * RandomInt(rng, 1, RandomInt(rng, 0, 5) == 0 ? 80 : 9);
  shape.latent_dim = RandomInt(rng, 1, shape.head_dim);
}

Shape RandomShape(Rng& rng) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  constexpr std::int32_t kBlocks[] = {1, 3, 8, 16, 24, 32, 48, 64, 100, 128};
  Shape shape;
  shape.q_per_kv = RandomInt(rng, 1, 14);
  shape.first_q_head = RandomInt(rng, 0, 10);
  shape.num_q_heads = RandomInt(rng, 1, 16);
  shape.first_kv_head = shape.first_q_head / shape.q_per_kv;
  shape.num_kv_heads =
      (shape.first_q_head + shape.num_q_heads - 1) / shape.q_per_kv - shape.first_kv_head + 1;
  shape.head_dim = 8 * RandomInt(rng, 1, RandomInt(rng, 0, 5) == 0 ? 32 : 9);
  shape.block_tokens = kBlocks[RandomInt(rng, 0, 9)];
  shape.dtype = kDTypes[RandomInt(rng, 0, 2)];
  shape.round_to_bfloat16 = RandomInt(rng, 0, 1) == 1;
  if (RandomInt(rng, 0, 2) == 0) MakeLatent(rng, shape);
  return shape;
}

// A mix of decode rows, chunks of prompts, windows and rows that see nothing.
Case RandomCase(Rng& rng, const Shape& shape, CpuStream& stream) {
  std::vector<std::int32_t> lengths;
  for (std::int32_t i = RandomInt(rng, 1, 4); i > 0; --i) {
    lengths.push_back(RandomInt(rng, 0, RandomInt(rng, 0, 3) == 0 ? 1300 : 150));
  }
  Case result(rng, shape, lengths, stream);
  for (std::size_t seq = 0; seq < lengths.size(); ++seq) {
    const std::int32_t rows = RandomInt(rng, 0, 1) == 0 ? 1 : RandomInt(rng, 1, 70);
    const std::int32_t window = RandomInt(rng, 0, 2) == 0 ? RandomInt(rng, 1, 90) : 1 << 20;
    for (std::int32_t i = 0; i < rows; ++i) {
      const std::int32_t len = std::max(0, lengths[seq] - rows + 1 + i);
      result.AddRow(rng, static_cast<std::int32_t>(seq), std::max(0, len - window), len);
    }
  }
  return result;
}

using AttentionTest = KernelTest;

TEST_P(AttentionTest, MatchesOneLongSoftmaxForAllShapes) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const Case attention = RandomCase(rng, RandomShape(rng), stream);
    attention.ExpectRight(attention.Run(stream));
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, RowsDoNotDependOnBatchOrThreads) {
  CpuStream one(1);
  CpuStream three(3);
  for (std::uint64_t seed = 100; seed < 100 + NumSeeds(25); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const Case attention = RandomCase(rng, RandomShape(rng), one);
    const Case::Result together = attention.Run(one);
    const Case::Result threaded = attention.Run(three);
    ASSERT_TRUE(SameBits(together.out, threaded.out));
    ASSERT_TRUE(SameBits(together.lse, threaded.lse));
    const std::size_t row_floats =
        together.out.size() / std::max<std::size_t>(1, attention.row_slot.size());
    for (std::size_t row = 0; row < attention.row_slot.size(); row += 3) {
      const Case::Result alone = attention.Run(three, row, 1);
      ASSERT_EQ(std::memcmp(alone.out.data(), together.out.data() + row * row_floats,
                            row_floats * sizeof(float)),
                0)
          << "row " << row;
    }
  }
}

// One long sequence: its parts are computed side by side, and more of them than fit at once.
TEST_P(AttentionTest, LongSequencesMatchWhateverTheThreads) {
  CpuStream one(1);
  CpuStream four(4);
  Rng rng(9);
  for (const bool round : {false, true}) {
    const Shape shape = {
        3, 1, 0, 0, 3, 8, 64, DType::kBFloat16, /*latent_dim=*/0, /*round_to_bfloat16=*/round};
    Case attention(rng, shape, {40'000}, one);
    attention.AddRow(rng, 0, 0, 40'000);
    attention.AddRow(rng, 0, 700, 39'000);
    const Case::Result result = attention.Run(four);
    attention.ExpectRight(result);
    for (CpuStream* stream : {&one, &four}) {
      const Case::Result again = attention.Run(*stream);
      ASSERT_TRUE(SameBits(result.out, again.out));
      ASSERT_TRUE(SameBits(result.lse, again.lse));
    }
  }
}

// Law 3.
TEST_P(AttentionTest, EmptyRangeIsZeroAndMinusInfinity) {
  CpuStream stream(2);
  Rng rng(4);
  const Shape shape = {4, 2, 0, 0, 2, 16, 16, DType::kFloat16};
  Case attention(rng, shape, {0, 40}, stream);
  attention.AddRow(rng, 0, 0, 0);
  attention.AddRow(rng, 1, 0, 0);
  attention.AddRow(rng, 1, 40, 40);
  attention.AddRow(rng, 1, 39, 40);
  attention.ExpectRight(attention.Run(stream));
}

// A later token that overflowed must not reach the rows before it.
TEST_P(AttentionTest, UnseenInfinityDoesNotReachARow) {
  CpuStream stream(2);
  for (const bool round : {false, true}) {
    Rng rng(5);
    const Shape shape = {
        2, 1, 0, 0, 2, 16, 16, DType::kFloat32, /*latent_dim=*/0, /*round_to_bfloat16=*/round};
    Case attention(rng, shape, {100}, stream);
    for (std::int32_t i = 90; i <= 100; ++i) attention.AddRow(rng, 0, i - 80, i);
    for (const std::int32_t token : {9, 95}) {
      const std::int64_t block = attention.block_table[token / 16];
      for (std::int32_t dim = 0; dim < 16; ++dim) {
        StoreElement(attention.v_blocks.data(), block * 256 + VIndex(token % 16, dim, 16),
                     DType::kFloat32, kInfinity);
        StoreElement(attention.k_blocks.data(), block * 256 + KIndex(token % 16, dim, 16, 16),
                     DType::kFloat32, std::nanf(""));
      }
    }
    for (const std::size_t count : {1, 3, 5, 11}) {
      for (std::size_t first = 0; first + count <= 11; ++first) {
        const Case::Result result = attention.Run(stream, first, count);
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t row = first + i;
          const bool sees = attention.visible_len[row] > 95 || attention.first_visible[row] <= 9;
          EXPECT_EQ(std::isfinite(result.out[i * 32]), !sees)
              << "row " << row << " of " << count << " from " << first;
        }
      }
    }
  }
}

// What cannot be told must not look like keys that are not there.
TEST_P(AttentionTest, ANanReachesWhoSeesIt) {
  CpuStream stream(2);
  for (const bool round : {false, true}) {
    for (const std::int32_t token : {0, 40, 70}) {
      for (const std::int32_t first : {0, token}) {
        SCOPED_TRACE("token " + std::to_string(token) + " from " + std::to_string(first));
        Rng rng(6);
        const Shape shape = {
            3, 1, 0, 0, 3, 16, 16, DType::kFloat32, /*latent_dim=*/0, /*round_to_bfloat16=*/round};
        Case attention(rng, shape, {100}, stream);
        attention.AddRow(rng, 0, first, token + 1);
        for (std::int32_t dim = 0; dim < 16; ++dim) {
          StoreElement(attention.k_blocks.data(),
                       std::int64_t{attention.block_table[token / 16]} * 256 +
                           KIndex(token % 16, dim, 16, 16),
                       DType::kFloat32, std::nanf(""));
        }
        const Case::Result result = attention.Run(stream);
        EXPECT_TRUE(std::isnan(result.out[0]));
        EXPECT_TRUE(std::isnan(result.lse[0]));
      }
    }
  }
}

// Few queries may take another way through the keys than many.
TEST_P(AttentionTest, OneRowIsTheSameInABatch) {
  CpuStream stream(2);
  constexpr std::int32_t kRows = 40;
  const auto check = [&](DType dtype, bool round, std::int32_t block_tokens, std::int32_t heads) {
    SCOPED_TRACE(std::string(DTypeName(dtype)) + (round ? " rounded, " : ", ") +
                 std::to_string(block_tokens) + " tokens a block, heads " + std::to_string(heads));
    Rng rng(7);
    const Shape shape = {heads, 1, 0, 0, heads, 64, block_tokens, dtype, /*latent_dim=*/0, round};
    Case attention(rng, shape, {700}, stream);
    for (std::int32_t i = 0; i < kRows; ++i) attention.AddRow(rng, 0, 2 * i + 1, 651 + i);
    const Case::Result together = attention.Run(stream);
    // All rows against the reference would take minutes with sanitizers.
    for (const std::size_t row : {0, 20, 39}) {
      for (std::int32_t head = 0; head < heads; ++head) attention.ExpectRight(together, row, head);
    }
    if (HasFatalFailure()) return;
    const std::size_t row_floats = together.out.size() / kRows;
    for (std::size_t row = 0; row < kRows; row += heads == 3 ? 1 : 3) {
      const Case::Result alone = attention.Run(stream, row, 1);
      ASSERT_EQ(std::memcmp(alone.out.data(), together.out.data() + row * row_floats,
                            row_floats * sizeof(float)),
                0)
          << "row " << row;
      const auto queries = static_cast<std::size_t>(heads);
      ASSERT_EQ(std::memcmp(alone.lse.data(), together.lse.data() + row * queries,
                            queries * sizeof(float)),
                0)
          << "row " << row;
    }
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool round : {false, true}) {
      for (const std::int32_t block_tokens : {16, 24, 64}) {
        for (const std::int32_t heads : {3, 9, 12, 13}) check(dtype, round, block_tokens, heads);
      }
    }
  }
}

// However low the scores are, what a row does not see has no weight.
TEST_P(AttentionTest, LowScoresLeaveUnseenKeysOut) {
  CpuStream stream(2);
  for (const bool round : {false, true}) {
    for (const float size : {1e3F, 1e6F, 1e15F}) {
      Rng rng(8);
      const Shape shape = {1, 1, 0, 0, 1, 64, 16, DType::kFloat32, /*latent_dim=*/0, round};
      Case attention(rng, shape, {300}, stream);
      for (const std::int32_t visible : {10, 200}) attention.AddRow(rng, 0, 0, visible);
      // All scores are the same power of two, so that each key has the same weight.
      std::fill(attention.q.begin(), attention.q.end(), size);
      const std::int64_t elements =
          static_cast<std::int64_t>(attention.k_blocks.size() / sizeof(float));
      for (std::int64_t i = 0; i < elements; ++i) {
        StoreElement(attention.k_blocks.data(), i, DType::kFloat32, -size);
      }
      for (std::vector<float>& k : attention.k) std::fill(k.begin(), k.end(), -size);
      const Case::Result together = attention.Run(stream);
      const Case::Result alone = attention.Run(stream, 0, 1);
      ASSERT_EQ(std::memcmp(alone.out.data(), together.out.data(), 64 * sizeof(float)), 0);
      for (std::int32_t dim = 0; dim < 64; ++dim) {
        double sum = 0;
        for (std::int32_t token = 0; token < 10; ++token) sum += attention.v[0][token * 64 + dim];
        ASSERT_NEAR(alone.out[dim], sum / 10, 1e-2) << "size " << size << " dim " << dim;
      }
    }
  }
}

// Keys without any weight are as keys that are not seen.
TEST_P(AttentionTest, ScoresOfMinusInfinityAreEmpty) {
  CpuStream stream(2);
  for (const bool round : {false, true}) {
    Rng rng(9);
    const Shape shape = {1, 1, 0, 0, 1, 16, 16, DType::kFloat32, /*latent_dim=*/0, round};
    Case attention(rng, shape, {20}, stream);
    attention.AddRow(rng, 0, 0, 20);
    std::fill(attention.q.begin(), attention.q.end(), 0.0F);
    attention.q[0] = 1.0F;
    const std::int64_t elements =
        static_cast<std::int64_t>(attention.k_blocks.size() / sizeof(float));
    for (std::int64_t i = 0; i < elements; ++i) {
      StoreElement(attention.k_blocks.data(), i, DType::kFloat32, -3e38F);
    }
    attention.scale = 100.0F;
    const Case::Result result = attention.Run(stream);
    EXPECT_EQ(result.lse[0], -kInfinity);
    EXPECT_EQ(result.out[0], 0.0F);
  }
}

TEST_P(AttentionTest, RefusesOtherDims) {
  CpuStream stream(1);
  for (const std::int32_t head_dim : {0, 4, 12, 264}) {
    const GqaAttentionParams params = {
        .v_blocks = &stream, .head_dim = head_dim, .value_dim = head_dim};
    const absl::Status status = GqaAttention(params, nullptr, stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << head_dim;
  }
  for (const std::int32_t latent_dim : {12, 1032}) {
    const GqaAttentionParams params = {.head_dim = latent_dim, .value_dim = 8};
    EXPECT_EQ(GqaAttention(params, nullptr, stream).code(), absl::StatusCode::kInvalidArgument);
  }
  for (const std::int32_t value_dim : {0, 8, 24}) {
    const GqaAttentionParams params = {.v_blocks = &stream, .head_dim = 16, .value_dim = value_dim};
    EXPECT_EQ(GqaAttention(params, nullptr, stream).code(), absl::StatusCode::kInvalidArgument);
  }
}

WEFT_FOR_EACH_TARGET(AttentionTest);

TEST(KvLayoutTest, IndicesFillABlock) {
  for (const std::int32_t block_tokens : {1, 2, 15, 16, 17, 24, 48, 128}) {
    for (const std::int32_t head_dim : {8, 64}) {
      std::vector<bool> k(block_tokens * head_dim);
      std::vector<bool> v(block_tokens * head_dim);
      for (std::int32_t token = 0; token < block_tokens; ++token) {
        for (std::int32_t dim = 0; dim < head_dim; ++dim) {
          const auto in_k = static_cast<std::size_t>(KIndex(token, dim, head_dim, block_tokens));
          const auto in_v = static_cast<std::size_t>(VIndex(token, dim, head_dim));
          ASSERT_LT(in_k, k.size());
          ASSERT_LT(in_v, v.size());
          ASSERT_FALSE(k[in_k] || v[in_v]);
          k[in_k] = true;
          v[in_v] = true;
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels
