#include "kernels/cuda/attention.h"

#include <cstring>

#include "tests/cuda_emu/attention_cases.h"

namespace weft::kernels::cuda {
namespace {

// Shapes of any kind: uneven heads, odd blocks, latents.
Shape RandomShape(Rng& rng, DType dtype) {
  constexpr std::int32_t kBlocks[] = {1, 3, 16, 24, 64, 100};
  Shape shape;
  shape.dtype = dtype;
  shape.q_per_kv = RandomInt(rng, 1, RandomInt(rng, 0, 3) == 0 ? 12 : 4);
  shape.first_q_head = RandomInt(rng, 0, 7);
  shape.num_q_heads = RandomInt(rng, 1, kShrink > 1 ? 3 : 6);
  shape.first_kv_head = shape.first_q_head / shape.q_per_kv;
  shape.num_kv_heads =
      (shape.first_q_head + shape.num_q_heads - 1) / shape.q_per_kv - shape.first_kv_head + 1;
  shape.head_dim = 8 * RandomInt(rng, 1, RandomInt(rng, 0, 5) == 0 ? 32 : 9);
  shape.block_tokens = kBlocks[RandomInt(rng, 0, 5)];
  if (RandomInt(rng, 0, 2) == 0) {
    shape.num_kv_heads = 1;
    shape.first_kv_head = 0;
    shape.q_per_kv = 30;
    shape.head_dim = 8 * RandomInt(rng, 1, RandomInt(rng, 0, 3) == 0 ? 72 : 9);
    shape.latent_dim = RandomInt(rng, 1, shape.head_dim);
  } else if (dtype != DType::kFloat32 && shape.head_dim % 64 == 0) {
    shape.head_dim += 8;  // those of tensor cores are attention_tensor_core_test's
  }
  return shape;
}

DType RandomKv(Rng& rng, float) { return static_cast<DType>(RandomInt(rng, 0, 2)); }
DType RandomKv(Rng&, BFloat16) { return DType::kBFloat16; }
DType RandomKv(Rng&, Float16) { return DType::kFloat16; }

using AttentionCudaTest = CudaTest;

TEST_P(AttentionCudaTest, IsTheCpusForAllShapes) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(20); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      Case attention = RandomCase(rng, RandomShape(rng, RandomKv(rng, type)));
      attention.q = RoundedFloats<T>(attention.q);
      const std::int32_t longest =
          *std::max_element(attention.lengths.begin(), attention.lengths.end());
      ExpectSame<T>(OnGpu<T>(attention, longest, stream()), OnCpu(attention, cpu));
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

// Split over blocks or not, alone or in a batch: the same bits.
TEST_P(AttentionCudaTest, RowsDoNotDependOnBatchOrSplit) {
  Rng rng(7);
  for (const bool latent : {false, true}) {
    Shape shape = {.num_q_heads = 3,
                   .num_kv_heads = 1,
                   .first_q_head = 0,
                   .first_kv_head = 0,
                   .q_per_kv = 3,
                   .head_dim = 24,
                   .block_tokens = 16,
                   .dtype = DType::kFloat16,
                   .latent_dim = latent ? 16 : 0};
    Case attention(rng, shape, {1700 / kShrink});
    const std::int32_t length = attention.lengths[0];
    attention.AddRow(rng, 0, 0, length);
    attention.AddRow(rng, 0, length / 3, length - 100 / kShrink);
    attention.AddRow(rng, 0, 0, 1);
    const Result split = OnGpu<float>(attention, length, stream());
    // So many parts that the launch is not split.
    const Result whole = OnGpu<float>(attention, kShrink > 1 ? 512 : 512 * 4096, stream());
    EXPECT_EQ(std::memcmp(split.out.data(), whole.out.data(), split.out.size() * sizeof(float)), 0);
    EXPECT_EQ(split.lse, whole.lse);
    ExpectSame<float>(split, OnCpu(attention, cpu));
    const std::vector<float> out(split.out.begin(), split.out.begin() + 3 * shape.value_dim());
    attention.row_slot.resize(1);
    attention.first_visible.resize(1);
    attention.visible_len.resize(1);
    attention.q.resize(3 * 24);
    EXPECT_EQ(OnGpu<float>(attention, length, stream()).out, out);
  }
}

// Law 3.
TEST_P(AttentionCudaTest, EmptyRangeIsZeroAndMinusInfinity) {
  Rng rng(4);
  const Shape shape = {.num_q_heads = 4,
                       .num_kv_heads = 2,
                       .first_q_head = 0,
                       .first_kv_head = 0,
                       .q_per_kv = 2,
                       .head_dim = 16,
                       .block_tokens = 16,
                       .dtype = DType::kFloat16};
  for (const std::int32_t bound : {40, 1600 / kShrink}) {  // whole, and split where there is room
    Case attention(rng, shape, {0, 40});
    attention.AddRow(rng, 0, 0, 0);
    attention.AddRow(rng, 1, 0, 0);
    attention.AddRow(rng, 1, 40, 40);
    attention.AddRow(rng, 1, 39, 40);
    const Result result = OnGpu<float>(attention, std::max(40, bound), stream());
    ExpectSame<float>(result, OnCpu(attention, cpu));
    for (std::size_t i = 0; i < 3 * 4; ++i) EXPECT_EQ(result.lse[i], -kInfinity);
    for (std::size_t i = 0; i < 3 * 4 * 16; ++i) EXPECT_EQ(result.out[i], 0.0F);
  }
}

TEST_P(AttentionCudaTest, RefusesWhatItHasNoKernelFor) {
  for (const std::int32_t head_dim : {0, 4, 12, 264}) {
    const GqaAttentionParams<float> params = {
        .geometry = {.v_blocks = this, .head_dim = head_dim, .value_dim = head_dim}};
    const absl::Status status = GqaAttention(params, nullptr, stream());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << head_dim;
    EXPECT_NE(status.message().find(std::to_string(head_dim)), std::string::npos) << status;
  }
  const GqaAttentionParams<BFloat16> params = {
      .geometry = {.v_blocks = this, .head_dim = 16, .value_dim = 16, .kv_dtype = DType::kFloat16}};
  const absl::Status status = GqaAttention(params, nullptr, stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("float16"), std::string::npos) << status;
}

WEFT_IN_EVERY_ORDER(AttentionCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
