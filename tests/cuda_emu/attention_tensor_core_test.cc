// GqaAttention() on tensor cores: within what rounding weights to the KV's type can do, of the
// CPU's kernel and of a reference in double precision.

#include <array>

#include "kernels/cuda/attention.h"
#include "tests/cuda_emu/attention_cases.h"

namespace weft::kernels::cuda {
namespace {

// Beside rounding: the order of fp32 sums.
constexpr double kSlack = 2e-5;

struct Reference {
  std::vector<double> out;
  std::vector<double> spread;  // sum of weights times |v|: what relative errors of weights move
  std::vector<double> lse;
};

// Softmax attention as it is written down, over K and V as they are stored.
template <typename Kv>
Reference InDouble(const Case& attention) {
  const Shape& shape = attention.shape;
  const kernels::GqaAttentionParams g = attention.Geometry();
  const auto k = RoundedFloats<Kv>(attention.k);
  const auto v = RoundedFloats<Kv>(shape.latent_dim > 0 ? attention.k : attention.v);
  std::vector<std::int64_t> first_token = {0};
  for (const std::int32_t length : attention.lengths)
    first_token.push_back(first_token.back() + length);
  Reference reference;
  for (std::int32_t row = 0; row < g.num_rows; ++row) {
    for (std::int32_t head = 0; head < g.num_q_heads; ++head) {
      const std::int32_t kv_head = (g.first_q_head + head) / g.q_per_kv - g.first_kv_head;
      const float* q = attention.q.data() + (std::int64_t{row} * g.num_q_heads + head) * g.head_dim;
      const std::int64_t first = first_token[attention.row_slot[row]];
      const auto at = [&](std::int32_t key) {
        return ((first + key) * g.num_kv_heads + kv_head) * g.head_dim;
      };
      std::vector<double> out(g.value_dim);
      std::vector<double> spread(g.value_dim);
      double sum = 0.0;
      for (std::int32_t key = attention.first_visible[row]; key < attention.visible_len[row];
           ++key) {
        double score = 0.0;
        for (std::int32_t d = 0; d < g.head_dim; ++d) score += double{q[d]} * k[at(key) + d];
        const double weight = std::exp(score * g.scale);  // scores are small
        sum += weight;
        for (std::int32_t d = 0; d < g.value_dim; ++d) {
          out[d] += weight * v[at(key) + d];
          spread[d] += weight * std::abs(v[at(key) + d]);
        }
      }
      for (std::int32_t d = 0; d < g.value_dim; ++d) {
        reference.out.push_back(sum > 0.0 ? out[d] / sum : 0.0);
        reference.spread.push_back(sum > 0.0 ? spread[d] / sum : 0.0);
      }
      reference.lse.push_back(std::log(sum));
    }
  }
  return reference;
}

template <typename T, typename Kv>
void ExpectWithinRounding(const Result& got, const Reference& want) {
  ASSERT_EQ(got.out.size(), want.out.size());
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    ASSERT_NEAR(got.out[i], want.out[i],
                kRounding<Kv> * want.spread[i] + kRounding<T> * std::abs(want.out[i]) + kSlack)
        << "value " << i;
  }
  ASSERT_EQ(got.lse.size(), want.lse.size());
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    if (want.lse[i] == -kInfinity) {
      ASSERT_EQ(got.lse[i], -kInfinity) << i;
    } else {
      ASSERT_NEAR(got.lse[i], want.lse[i], kSlack) << i;
    }
  }
}

// Checks `attention` against both; `max_visible_len` is what the launch is told.
template <typename T, typename Kv>
void Check(Case attention, std::int32_t max_visible_len, CudaStream& stream, CpuStream& cpu) {
  attention.q = RoundedFloats<Kv>(attention.q);
  const Reference want = InDouble<Kv>(attention);
  ExpectWithinRounding<T, Kv>(OnGpu<T>(attention, max_visible_len, stream), want);
  if (::testing::Test::HasFatalFailure()) return;
  const Result on_cpu = OnCpu(attention, cpu);
  ExpectWithinRounding<float, Kv>(on_cpu, want);
}

template <typename Kv>
constexpr DType kDTypeOf = std::is_same_v<Kv, BFloat16> ? DType::kBFloat16 : DType::kFloat16;

// Heads [first_q_head, ...) of q_per_kv to a KV head, so that a rank has uneven ones.
Shape Gqa(std::int32_t head_dim, std::int32_t q_per_kv, std::int32_t first_q_head,
          std::int32_t num_q_heads, std::int32_t block_tokens, DType dtype) {
  const std::int32_t first_kv_head = first_q_head / q_per_kv;
  return {.num_q_heads = num_q_heads,
          .num_kv_heads = (first_q_head + num_q_heads - 1) / q_per_kv - first_kv_head + 1,
          .first_q_head = first_q_head,
          .first_kv_head = first_kv_head,
          .q_per_kv = q_per_kv,
          .head_dim = head_dim,
          .block_tokens = block_tokens,
          .dtype = dtype};
}
Shape Mla(std::int32_t first_q_head, std::int32_t num_q_heads, std::int32_t block_tokens,
          DType dtype) {
  return {.num_q_heads = num_q_heads,
          .num_kv_heads = 1,
          .first_q_head = first_q_head,
          .first_kv_head = 0,
          .q_per_kv = 128,
          .head_dim = 576,
          .block_tokens = block_tokens,
          .dtype = dtype,
          .latent_dim = 512};
}

template <typename Kv>
Shape RandomShape(Rng& rng) {
  constexpr std::int32_t kBlocks[] = {1, 3, 16, 24, 64, 100};
  const std::int32_t block = kBlocks[RandomInt(rng, 0, 5)];
  if (RandomInt(rng, 0, 2) == 0) {
    return Mla(RandomInt(rng, 0, 20), RandomInt(rng, 1, RandomInt(rng, 0, 3) == 0 ? 70 : 20), block,
               kDTypeOf<Kv>);
  }
  const std::int32_t q_per_kv = RandomInt(rng, 1, RandomInt(rng, 0, 3) == 0 ? 70 : 12);
  return Gqa(64 * RandomInt(rng, 1, 2), q_per_kv, RandomInt(rng, 0, 9),
             RandomInt(rng, 1, RandomInt(rng, 0, 3) == 0 ? q_per_kv : 7), block, kDTypeOf<Kv>);
}

template <typename Body>
void ForEachKv(const Body& body) {
  body(BFloat16());
  body(Float16());
}

using AttentionTensorCoreTest = CudaTest;

TEST_P(AttentionTensorCoreTest, IsTheReferencesForAllShapes) {
  ForEachKv([&](auto kv) {
    using Kv = decltype(kv);
    for (std::uint64_t seed = 0; seed < NumSeeds(12); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      const Case attention = RandomCase(rng, RandomShape<Kv>(rng));
      const std::int32_t longest =
          *std::max_element(attention.lengths.begin(), attention.lengths.end());
      if (seed % 2 == 0) {
        Check<float, Kv>(attention, longest, stream(), cpu);
      } else {
        Check<Kv, Kv>(attention, longest, stream(), cpu);
      }
      if (HasFatalFailure()) return;
    }
  });
}

// Each variant of the kernel, over sequences of very different lengths: one with several chunks, a
// short one, an empty one, several rows of one, and a row that is padding.
TEST_P(AttentionTensorCoreTest, SplitsLongSequencesAndMerges) {
  const std::array<Shape, 4> shapes = {
      Gqa(64, 4, 0, 4, 16, DType::kBFloat16), Gqa(128, 24, 2, 22, 64, DType::kBFloat16),
      Mla(0, 5, 16, DType::kBFloat16), Mla(3, 20, 48, DType::kBFloat16)};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE("head_dim " + std::to_string(shape.head_dim) + ", heads " +
                 std::to_string(shape.num_q_heads));
    Rng rng(5);
    const std::int32_t length = (shape.latent_dim > 0 ? 1100 : 1500) / kShrink;
    Case attention(rng, shape, {length, 70, 0});
    attention.AddRow(rng, 0, 0, length);
    attention.AddRow(rng, 1, 3, 69);
    attention.AddRow(rng, 1, 0, 70);
    attention.AddRow(rng, 2, 0, 0);
    attention.AddRow(rng, 0, 0, 0);
    cuda_emu::ResetCounters();
    Check<float, BFloat16>(attention, length, stream(), cpu);
#ifdef WEFT_CUDA_EMU
    // Beside KvAppend(): attention and its merge.
    if (kShrink == 1) {
      EXPECT_EQ(cuda_emu::CountersOfThread().launches, 3);
    }
#endif
    if (HasFatalFailure()) return;
  }
}

// A row's visible range is its own, whoever shares its tile.
TEST_P(AttentionTensorCoreTest, RowsOfOneSequenceSeeTheirOwnRanges) {
  using Ranges = std::vector<std::pair<std::int32_t, std::int32_t>>;
  for (const Ranges& ranges : {Ranges{{0, 150}, {149, 150}, {60, 130}, {64, 128}, {0, 1}, {31, 31}},
                               Ranges{{0, 150}, {0, 20}, {0, 149}}, Ranges{{0, 150}, {70, 150}}}) {
    for (const Shape& shape :
         {Gqa(64, 2, 1, 5, 16, DType::kFloat16), Mla(0, 3, 16, DType::kFloat16)}) {
      Rng rng(6);
      Case attention(rng, shape, {150});
      for (const auto& [first, len] : ranges) attention.AddRow(rng, 0, first, len);
      Check<float, Float16>(attention, 150, stream(), cpu);
      if (HasFatalFailure()) return;
    }
  }
}

WEFT_IN_EVERY_ORDER(AttentionTensorCoreTest);

// What the swizzle promises, and what memory traffic the tiles cost: not of threads' order.
TEST(AttentionTensorCoreCostTest, NoBankConflictsAndLittleMoreThanEveryByteOnce) {
  const std::array<Shape, 4> shapes = {
      Gqa(64, 8, 0, 8, 16, DType::kBFloat16), Gqa(128, 8, 0, 8, 16, DType::kBFloat16),
      Gqa(128, 24, 0, 24, 16, DType::kBFloat16), Mla(0, 8, 16, DType::kBFloat16)};
  auto stream = CudaStream::Create();
  ASSERT_TRUE(stream.ok());
  for (const Shape& shape : shapes) {
    SCOPED_TRACE("head_dim " + std::to_string(shape.head_dim) + ", heads " +
                 std::to_string(shape.num_q_heads));
    Rng rng(3);
    const std::int32_t length = 1200 / kShrink;
    Case attention(rng, shape, {length, length / 2});
    attention.AddRow(rng, 0, 0, length);
    attention.AddRow(rng, 1, 0, length / 2);
    // KvAppend() is not counted: it moves single values.
    cuda_emu::ResetCounters();
    OnGpu<float>(attention, length, **stream);
    const cuda_emu::Counters& counters = cuda_emu::CountersOfThread();
    EXPECT_GT(counters.matrix_loads, 0);
    EXPECT_EQ(counters.bank_conflicts, 0);
    const std::int64_t tokens = length + length / 2;
    const std::int64_t kv =
        tokens * shape.num_kv_heads * shape.head_dim * 2 * (shape.latent_dim > 0 ? 1 : 2);
    const std::int64_t rows = 2 * std::int64_t{shape.num_q_heads} * 4;
    const std::int64_t minimum = kv + rows * (shape.head_dim + shape.value_dim());
    EXPECT_LE(counters.global_read_bytes + counters.global_written_bytes, minimum * 11 / 10);
  }
}

}  // namespace
}  // namespace weft::kernels::cuda
