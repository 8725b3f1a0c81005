#include "kernels/cuda/kv_append.h"

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

using KvAppendCudaTest = CudaTest;

struct Shape {
  std::int32_t rows;
  std::int32_t heads;
  std::int32_t dim;
  std::int32_t block_tokens;
  std::int32_t num_blocks = 5;
  DType dtype;
  bool latent;
  std::int32_t norm_dim;  // 0: no norm
  std::int32_t rope_begin;
  std::int32_t rope_dim;  // 0: no rotation

  std::int64_t pool() const { return std::int64_t{num_blocks} * heads * block_tokens * dim; }
};

Shape RandomShape(Rng& rng) {
  constexpr std::int32_t kBlocks[] = {1, 3, 16, 24, 64};
  Shape shape = {.rows = RandomInt(rng, 0, 12),
                 .heads = RandomInt(rng, 1, 3),
                 .dim = 8 * RandomInt(rng, 1, 20),
                 .block_tokens = kBlocks[RandomInt(rng, 0, 4)],
                 .dtype = static_cast<DType>(RandomInt(rng, 0, 2)),
                 .latent = RandomInt(rng, 0, 1) == 0};
  if (RandomInt(rng, 0, 1) == 0) shape.norm_dim = shape.dim;
  if (RandomInt(rng, 0, 3) != 0) shape.rope_dim = shape.dim;
  if (!shape.latent) return shape;
  shape.heads = 1;
  // The latent is normed, the key beside it rotated.
  shape.rope_dim = shape.dim / 4;
  shape.rope_begin = shape.dim - shape.rope_dim;
  if (shape.norm_dim != 0) shape.norm_dim = shape.rope_begin;
  return shape;
}

// What the CPU's ops, one after the other, make of K.
std::vector<float> NormedAndRotated(const Shape& shape, std::vector<float> k,
                                    const std::vector<float>& weight, const std::vector<float>& cos,
                                    const std::vector<float>& sin, CpuStream& cpu) {
  for (std::int64_t at = 0; at < std::int64_t{shape.rows} * shape.heads; ++at) {
    float* head = k.data() + at * shape.dim;
    if (shape.norm_dim != 0) {
      EXPECT_TRUE(kernels::RmsNorm({.x = head,
                                    .weight = weight.data(),
                                    .out = head,
                                    .num_rows = 1,
                                    .size = shape.norm_dim,
                                    .eps = 1e-6F},
                                   cpu)
                      .ok());
    }
    const std::int64_t half = shape.rope_dim / 2;
    const std::int64_t row = at / shape.heads;
    if (half == 0) continue;
    EXPECT_TRUE(kernels::Rope({.x = head + shape.rope_begin,
                               .cos = cos.data() + row * half,
                               .sin = sin.data() + row * half,
                               .num_rows = 1,
                               .num_heads = 1,
                               .head_dim = shape.rope_dim,
                               .row_stride = shape.dim},
                              cpu)
                    .ok());
  }
  return k;
}

TEST_P(KvAppendCudaTest, StoresWhatTheCpusNormRotationAndAppendDo) {
  ForEachType([&](auto type) {
    using T = decltype(type);
    for (std::uint64_t seed = 0; seed < NumSeeds(30); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Rng rng(seed);
      Shape shape = RandomShape(rng);
      const std::int64_t width = std::int64_t{shape.heads} * shape.dim;
      // Slots at random, as interleaved positions give them; some rows are not stored.
      std::vector<std::int64_t> slots(shape.num_blocks * shape.block_tokens);
      for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
      std::shuffle(slots.begin(), slots.end(), rng);
      shape.rows = std::min(shape.rows, static_cast<std::int32_t>(slots.size()));
      slots.resize(shape.rows);
      const auto k = RoundedFloats<T>(RandomFloats(rng, shape.rows * width));
      const auto v = RoundedFloats<T>(RandomFloats(rng, shape.rows * width));
      const auto weight = RandomFloats(rng, shape.dim);
      const auto cos = RandomFloats(rng, std::int64_t{shape.rows} * shape.rope_dim / 2);
      const auto sin = RandomFloats(rng, std::int64_t{shape.rows} * shape.rope_dim / 2);

      const std::vector<float> ready = NormedAndRotated(shape, k, weight, cos, sin, cpu);
      std::vector<float> want_k(shape.pool(), -1.0F);  // in the GPU's order of a block
      std::vector<float> want_v = want_k;
      for (std::int32_t row = 0; row < shape.rows; ++row) {
        if (row % 4 == 3) slots[row] = -1;
        for (std::int64_t i = 0; i < width && slots[row] >= 0; ++i) {
          const std::int64_t at =
              KvIndex(slots[row] / shape.block_tokens, static_cast<std::int32_t>(i / shape.dim),
                      static_cast<std::int32_t>(slots[row] % shape.block_tokens), shape.heads,
                      shape.block_tokens, shape.dim) +
              i % shape.dim;
          want_k[at] = ready[row * width + i];
          if (!shape.latent) want_v[at] = v[row * width + i];
        }
      }
      const std::size_t bytes = static_cast<std::size_t>(shape.pool()) * DTypeBytes(shape.dtype);
      std::vector<std::byte> unwritten(bytes);
      for (std::int64_t i = 0; i < shape.pool(); ++i)
        StoreElement(unwritten.data(), i, shape.dtype, -1.0F);
      const DeviceArray<std::byte> k_blocks(unwritten, stream());
      const DeviceArray<std::byte> v_blocks(unwritten, stream());
      const DeviceArray<T> device_k(Stored<T>(k), stream());
      const DeviceArray<T> device_v(Stored<T>(v), stream());
      const DeviceArray<std::int64_t> device_slots(slots, stream());
      const DeviceArray<float> device_weight(weight, stream());
      const DeviceArray<float> device_cos(cos, stream());
      const DeviceArray<float> device_sin(sin, stream());
      ASSERT_TRUE(KvAppend<T>({.k = device_k.data(),
                               .v = shape.latent ? nullptr : device_v.data(),
                               .slots = device_slots.data(),
                               .k_blocks = k_blocks.data(),
                               .v_blocks = v_blocks.data(),
                               .norm_weight = shape.norm_dim != 0 ? device_weight.data() : nullptr,
                               .cos = shape.rope_dim != 0 ? device_cos.data() : nullptr,
                               .sin = device_sin.data(),
                               .num_rows = shape.rows,
                               .num_kv_heads = shape.heads,
                               .head_dim = shape.dim,
                               .block_tokens_per_rank = shape.block_tokens,
                               .kv_stride = width,
                               .norm_dim = shape.norm_dim,
                               .rope_begin = shape.rope_begin,
                               .rope_dim = shape.rope_dim,
                               .eps = 1e-6F,
                               .kv_dtype = shape.dtype},
                              stream())
                      .ok());
      const auto got_k = k_blocks.Read();
      const auto got_v = v_blocks.Read();
      const double rounding = shape.dtype == DType::kFloat32    ? 0.0
                              : shape.dtype == DType::kBFloat16 ? 0x1p-8
                                                                : 0x1p-11;
      for (std::int64_t i = 0; i < shape.pool(); ++i) {
        ASSERT_NEAR(LoadElement(got_k.data(), i, shape.dtype), want_k[i],
                    rounding * std::abs(want_k[i]) + 1e-5)
            << i;
        ASSERT_NEAR(LoadElement(got_v.data(), i, shape.dtype), want_v[i],
                    rounding * std::abs(want_v[i]) + 1e-7)
            << i;
      }
    }
  });
}

TEST_P(KvAppendCudaTest, RefusesWhatIsNotWithinAHead) {
  const absl::Status status = KvAppend<float>(
      {.num_rows = 1, .num_kv_heads = 1, .head_dim = 16, .rope_begin = 8, .rope_dim = 16},
      stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

WEFT_IN_EVERY_ORDER(KvAppendCudaTest);

}  // namespace
}  // namespace weft::kernels::cuda
