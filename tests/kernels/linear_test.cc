#include "kernels/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/panel.h"
#include "kernels/elementwise.h"
#include "tests/kernels/kernel_test.h"

namespace weft::kernels {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr WeightFormat kFormats[] = {WeightFormat::kFloat32, WeightFormat::kBFloat16,
                                     WeightFormat::kFloat16, WeightFormat::kInt8,
                                     WeightFormat::kInt4};

float Round(float value, DType dtype) {
  float bits = 0.0F;
  StoreElement(&bits, 0, dtype, value);
  return LoadElement(&bits, 0, dtype);
}

// A weight as a checkpoint has it, at an odd address, and what its values round to.
struct Source {
  std::vector<std::byte> bytes;
  MatrixView view;
  std::vector<float> stored;  // as the source dtype holds them

  Source(Rng& rng, std::int32_t rows, std::int32_t cols, DType dtype) {
    const std::int64_t stride = cols + RandomInt(rng, 0, 3);
    bytes.resize(static_cast<std::size_t>(rows * stride * DTypeBytes(dtype) + 1));
    view = {bytes.data() + 1, dtype, rows, cols, stride};
    for (std::int32_t row = 0; row < rows; ++row) {
      for (const float value : RandomFloats(rng, cols)) {
        const std::int64_t at = row * stride + static_cast<std::int64_t>(stored.size()) % cols;
        StoreElement(bytes.data() + 1, at, dtype, value);
        stored.push_back(LoadElement(bytes.data() + 1, at, dtype));
      }
    }
  }
};

// What is stored of input `in` of output `out`, by the layout that panel.h describes.
float StoredValue(const PackedMatrix& weight, std::int32_t out, std::int32_t in) {
  const std::int32_t lane = out % 16;
  const std::byte* panel =
      weight.data() + out / 16 * PanelBytes(weight.in_features(), weight.format());
  if (const std::optional<DType> dtype = DTypeOf(weight.format())) {
    return LoadElement(panel, PanelIndex(in, lane, *dtype), *dtype);
  }
  const bool bytes = weight.format() == WeightFormat::kInt8;
  const std::byte* group = panel + in / 32 * (bytes ? 32 + 512 : 32 + 256);
  const float scale = LoadElement(group, lane, DType::kFloat16);
  const auto* values = reinterpret_cast<const unsigned char*>(group + 32);
  const std::int32_t i = in % 32;
  if (bytes) {
    const int byte = values[(i / 2 * 16 + lane) * 2 + i % 2];
    return scale * static_cast<float>(byte < 128 ? byte : byte - 256);
  }
  // Of a word the low half has the even inputs.
  const int byte = values[(i / 8 * 16 + lane) * 4 + i % 2 * 2 + i % 8 / 4];
  return scale * static_cast<float>((i % 4 < 2 ? byte % 16 : byte / 16) - 8);
}

// That what is stored of a row is as near as the format allows.
void ExpectNear(const PackedMatrix& weight, std::int32_t out, absl::Span<const float> row) {
  for (std::int32_t in = 0; in < weight.in_features(); ++in) {
    const float stored = StoredValue(weight, out, in);
    if (const std::optional<DType> dtype = DTypeOf(weight.format())) {
      ASSERT_EQ(stored, Round(row[in], *dtype)) << "input " << in;
      continue;
    }
    float largest = 0;
    for (std::int32_t i = in / 32 * 32; i < std::min(weight.in_features(), in / 32 * 32 + 32);
         ++i) {
      if (std::abs(row[i]) > std::abs(largest)) largest = row[i];
    }
    const bool bytes = weight.format() == WeightFormat::kInt8;
    const float step = std::abs(largest) / (bytes ? 127 : 8);
    // Opposite to the largest, int4 has only 7 steps. Scales are rounded to 11 bits.
    const bool clamped = !bytes && row[in] * largest < 0 && std::abs(row[in]) > 7.4F * step;
    ASSERT_LE(std::abs(stored - row[in]),
              step * (clamped ? 1.0F : 0.5F) + std::abs(largest) * 5e-4F + 1e-7F)
        << "input " << in << " of a group up to " << largest;
  }
}

struct Case {
  PackedMatrix weight;
  std::vector<float> values;  // [out, in] as packed
  std::vector<float> x;
  std::vector<float> bias;
  std::vector<float> residual;
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int32_t rows;

  Case(Rng& rng, std::int32_t rows, std::int32_t out, std::int32_t in, WeightFormat format,
       CpuStream& stream)
      : rows(rows) {
    Source source(rng, out, in, kDTypes[RandomInt(rng, 0, 2)]);
    absl::StatusOr<PackedMatrix> packed = PackedMatrix::Pack({&source.view, 1}, format, stream);
    EXPECT_TRUE(packed.ok()) << packed.status();
    weight = *std::move(packed);
    for (std::int32_t row = 0; row < out; ++row) {
      ExpectNear(weight, row, absl::MakeConstSpan(source.stored).subspan(row * in, in));
      for (std::int32_t col = 0; col < in; ++col) values.push_back(StoredValue(weight, row, col));
    }
    x_stride = in + RandomInt(rng, 0, 5);
    y_stride = out + RandomInt(rng, 0, 5);
    x = RandomFloats(rng, rows * x_stride);
    bias = RandomFloats(rng, out);
    residual = RandomFloats(rng, rows * y_stride);
  }

  std::vector<float> Run(CpuStream& stream, bool with_bias, bool with_residual) const {
    std::vector<float> y(static_cast<std::size_t>(rows * y_stride), -7.0F);
    EXPECT_TRUE(Linear({.x = x.data(),
                        .weight = &weight,
                        .bias = with_bias ? bias.data() : nullptr,
                        .residual = with_residual ? residual.data() : nullptr,
                        .y = y.data(),
                        .num_rows = rows,
                        .x_stride = x_stride,
                        .y_stride = y_stride},
                       stream)
                    .ok());
    return y;
  }

  // Row `row` of x as the kernels of this target take it.
  std::vector<float> Inputs(std::int64_t row) const {
    const std::int64_t in = weight.in_features();
    std::vector<float> inputs(x.begin() + row * x_stride, x.begin() + row * x_stride + in);
    if (!HasDotProducts()) return inputs;
    if (weight.format() == WeightFormat::kBFloat16) {
      for (float& value : inputs) value = Round(value, DType::kBFloat16);
    } else if (!DTypeOf(weight.format()).has_value()) {
      for (std::int64_t first = 0; first < in; first += 32) {
        const std::int64_t end = std::min(in, first + 32);
        float largest = 0;
        for (std::int64_t i = first; i < end; ++i) largest = std::max(largest, std::abs(inputs[i]));
        if (largest == 0) continue;
        for (std::int64_t i = first; i < end; ++i) {
          inputs[i] = std::nearbyint(inputs[i] * (32767 / largest)) * (largest / 32767);
        }
      }
    }
    return inputs;
  }

  void ExpectRight(const std::vector<float>& y, bool with_bias, bool with_residual) const {
    const std::int32_t in = weight.in_features();
    const std::int32_t out = weight.out_features();
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::vector<float> inputs = Inputs(row);
      for (std::int64_t col = 0; col < y_stride; ++col) {
        const float got = y[row * y_stride + col];
        if (col >= out) {
          ASSERT_EQ(got, -7.0F) << "written past a row: " << row << ", " << col;
          continue;
        }
        double want = 0.0;
        double size = 1.0;
        for (std::int64_t k = 0; k < in; ++k) {
          const double product = double{inputs[k]} * values[col * in + k];
          want += product;
          size += std::abs(product);
        }
        if (with_bias) want += bias[col];
        if (with_residual) want += residual[row * y_stride + col];
        ASSERT_NEAR(got, want, 1e-6 * size) << "row " << row << ", output " << col;
      }
    }
  }
};

using LinearTest = KernelTest;

TEST_P(LinearTest, PacksATransposedViewAndEveryOtherRow) {
  CpuStream stream(2);
  Rng rng(3);
  const std::vector<float> stored = RandomFloats(rng, 20 * 33);  // [20, 33]
  const MatrixView columns = {stored.data(), DType::kFloat32, 33, 20, 1, 33};
  const MatrixView odd_rows = {stored.data() + 33, DType::kFloat32, 10, 33, 2 * 33};
  const auto transposed = PackedMatrix::Pack({&columns, 1}, WeightFormat::kFloat32, stream);
  const auto rows = PackedMatrix::Pack({&odd_rows, 1}, WeightFormat::kFloat32, stream);
  ASSERT_TRUE(transposed.ok() && rows.ok());
  const auto row_of = [&](const PackedMatrix& weight, std::int32_t row) {
    std::vector<float> out(weight.in_features());
    EXPECT_TRUE(
        Embedding({.weight = &weight, .ids = &row, .out = out.data(), .num_rows = 1}, stream).ok());
    return out;
  };
  for (std::int32_t i = 0; i < 33; ++i) {
    const std::vector<float> out = row_of(*transposed, i);
    for (std::int32_t j = 0; j < 20; ++j) ASSERT_EQ(out[j], stored[j * 33 + i]);
  }
  for (std::int32_t i = 0; i < 10; ++i) {
    const std::vector<float> out = row_of(*rows, i);
    for (std::int32_t j = 0; j < 33; ++j) ASSERT_EQ(out[j], stored[(2 * i + 1) * 33 + j]);
  }
}

TEST_P(LinearTest, GroupedProductsAreWhatEachIsAlone) {
  CpuStream stream(3);
  for (std::uint64_t seed = 0; seed < NumSeeds(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t out = RandomInt(rng, 1, 90);
    const std::int32_t in = RandomInt(rng, 1, 90);
    std::vector<Case> cases;
    for (std::int32_t i = RandomInt(rng, 1, 9); i > 0; --i) {
      const std::int32_t rows = seed % 4 == 0 && i == 1 ? 300 : RandomInt(rng, 0, 6);
      cases.emplace_back(rng, rows, out, in, kFormats[seed % 5], stream);
    }
    std::vector<std::vector<float>> y;
    std::vector<LinearParams> products;
    for (const Case& linear : cases) {
      y.emplace_back(static_cast<std::size_t>(linear.rows * linear.y_stride), -7.0F);
      products.push_back({.x = linear.x.data(),
                          .weight = &linear.weight,
                          .bias = linear.bias.data(),
                          .residual = linear.residual.data(),
                          .y = y.back().data(),
                          .num_rows = linear.rows,
                          .x_stride = linear.x_stride,
                          .y_stride = linear.y_stride});
    }
    ASSERT_TRUE(GroupedLinear(products, stream).ok());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      ASSERT_TRUE(SameBits(y[i], cases[i].Run(stream, true, true))) << "product " << i;
    }
  }
  EXPECT_TRUE(GroupedLinear({}, stream).ok());
}

TEST_P(LinearTest, AGatedProductIsItsTwoAndTheGate) {
  CpuStream one(1);
  CpuStream three(3);
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const WeightFormat format = kFormats[seed % 5];
    const std::int32_t rows = seed % 4 == 0 ? RandomInt(rng, 13, 230) : RandomInt(rng, 1, 14);
    const std::int32_t size = seed % 3 == 0 ? 16 * RandomInt(rng, 1, 9) : RandomInt(rng, 1, 150);
    const std::int32_t in = RandomInt(rng, 1, seed % 7 == 0 ? 700 : 90);
    const Source gate(rng, size, in, kDTypes[RandomInt(rng, 0, 2)]);
    const Source up(rng, size, in, kDTypes[RandomInt(rng, 0, 2)]);
    const std::vector<float> x = RandomFloats(rng, std::int64_t{rows} * in);
    const std::vector<float> biases = RandomFloats(rng, std::int64_t{2} * size);
    const float* const bias = seed % 2 == 0 ? biases.data() : nullptr;

    const MatrixView views[] = {gate.view, up.view};
    const auto stacked = PackedMatrix::Pack(views, format, one);
    ASSERT_TRUE(stacked.ok()) << stacked.status();
    std::vector<float> both(std::size_t(rows) * 2 * size);
    ASSERT_TRUE(Linear({.x = x.data(),
                        .weight = &*stacked,
                        .bias = bias,
                        .residual = nullptr,
                        .y = both.data(),
                        .num_rows = rows,
                        .x_stride = in,
                        .y_stride = std::int64_t{2} * size},
                       one)
                    .ok());
    std::vector<float> expected(std::size_t(rows) * size);
    ASSERT_TRUE(
        SiluMul({.gate_up = both.data(), .out = expected.data(), .num_rows = rows, .size = size},
                one)
            .ok());

    const auto gated = PackedMatrix::PackGated(gate.view, up.view, format, three);
    ASSERT_TRUE(gated.ok()) << gated.status();
    ASSERT_TRUE(gated->gated());
    ASSERT_EQ(gated->out_features(), 2 * size);
    const std::int64_t y_stride = size + RandomInt(rng, 0, 5);
    for (const std::int32_t part : {rows, 1, 5, 13}) {
      SCOPED_TRACE("in parts of " + std::to_string(part));
      std::vector<float> y(static_cast<std::size_t>(rows * y_stride), -7.0F);
      for (std::int32_t row = 0; row < rows; row += part) {
        ASSERT_TRUE(Linear({.x = x.data() + std::int64_t{row} * in,
                            .weight = &*gated,
                            .bias = bias,
                            .residual = nullptr,
                            .y = y.data() + row * y_stride,
                            .num_rows = std::min(part, rows - row),
                            .x_stride = in,
                            .y_stride = y_stride},
                           three)
                        .ok());
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t col = 0; col < y_stride; ++col) {
          ASSERT_EQ(y[row * y_stride + col], col < size ? expected[row * size + col] : -7.0F)
              << "row " << row << ", output " << col;
        }
      }
    }
  }
}

TEST_P(LinearTest, MatchesDoublesForAllShapesAndTypes) {
  CpuStream stream(2);
  for (std::uint64_t seed = 0; seed < NumSeeds(60); ++seed) {
    Rng rng(seed);
    const WeightFormat format = kFormats[seed % 5];
    const std::int32_t rows = seed % 4 == 0 ? RandomInt(rng, 13, 150) : RandomInt(rng, 1, 14);
    const std::int32_t out = RandomInt(rng, 1, seed % 5 == 0 ? 150 : 40);
    const std::int32_t in = RandomInt(rng, 1, seed % 7 == 0 ? 700 : 40);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case linear(rng, rows, out, in, format, stream);
    const bool with_bias = seed % 2 == 0;
    const bool with_residual = seed % 3 == 0;
    linear.ExpectRight(linear.Run(stream, with_bias, with_residual), with_bias, with_residual);
    if (HasFatalFailure()) return;
  }
}

// Law 2: batching must not change a token.
TEST_P(LinearTest, OutputsDoNotDependOnBatchOrThreads) {
  CpuStream one(1);
  CpuStream three(3);
  for (std::uint64_t seed = 0; seed < NumSeeds(12); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    const std::int32_t rows = RandomInt(rng, 20, 230);
    const Case batch(rng, rows, RandomInt(rng, 1, 70), RandomInt(rng, 200, 600), kFormats[seed % 5],
                     one);
    const std::vector<float> together = batch.Run(one, true, true);
    ASSERT_TRUE(SameBits(together, batch.Run(three, true, true)));
    for (const std::int32_t part : {1, 2, 5, 6, 7, 8, 12, 13, 19}) {
      std::vector<float> y(together.size(), -7.0F);
      for (std::int32_t row = 0; row < rows; row += part) {
        ASSERT_TRUE(Linear({.x = batch.x.data() + row * batch.x_stride,
                            .weight = &batch.weight,
                            .bias = batch.bias.data(),
                            .residual = batch.residual.data() + row * batch.y_stride,
                            .y = y.data() + row * batch.y_stride,
                            .num_rows = std::min(part, rows - row),
                            .x_stride = batch.x_stride,
                            .y_stride = batch.y_stride},
                           three)
                        .ok());
      }
      ASSERT_TRUE(SameBits(together, y)) << "in parts of " << part;
    }
  }
}

// Inputs that are rounded, or weights that are widened, some at a time.
TEST_P(LinearTest, ManyInputsAreWhatOneRowMakesOfThem) {
  CpuStream stream(2);
  struct Shape {
    std::int32_t in;
    std::int32_t rows;
  };
  for (const Shape& shape : {Shape{1536, 72}, Shape{1537, 145}, Shape{3105, 72}, Shape{9249, 12}}) {
    for (const WeightFormat format : kFormats) {
      SCOPED_TRACE(std::string(FormatName(format)) + ", inputs " + std::to_string(shape.in));
      Rng rng(static_cast<std::uint64_t>(shape.in));
      const Source gate(rng, 20, shape.in, DType::kFloat32);
      const Source up(rng, 20, shape.in, DType::kFloat32);
      const std::vector<float> x = RandomFloats(rng, std::int64_t{shape.rows} * shape.in);
      const MatrixView views[] = {gate.view, up.view};
      const absl::StatusOr<PackedMatrix> weights[] = {
          PackedMatrix::Pack(views, format, stream),
          PackedMatrix::PackGated(gate.view, up.view, format, stream)};
      for (const auto& weight : weights) {
        ASSERT_TRUE(weight.ok()) << weight.status();
        const std::int64_t outputs = weight->product_features();
        const auto run = [&](std::int32_t row, std::int32_t rows, float* y) {
          return Linear({.x = x.data() + std::int64_t{row} * shape.in,
                         .weight = &*weight,
                         .bias = nullptr,
                         .residual = nullptr,
                         .y = y + row * outputs,
                         .num_rows = rows,
                         .x_stride = shape.in,
                         .y_stride = outputs},
                        stream);
        };
        std::vector<float> together(static_cast<std::size_t>(shape.rows * outputs));
        std::vector<float> alone(together.size());
        ASSERT_TRUE(run(0, shape.rows, together.data()).ok());
        for (std::int32_t row = 0; row < shape.rows; ++row) {
          ASSERT_TRUE(run(row, 1, alone.data()).ok());
        }
        ASSERT_TRUE(SameBits(together, alone));
      }
    }
  }
}

TEST_P(LinearTest, ResidualMayBeTheOutput) {
  CpuStream stream(2);
  for (const std::int32_t rows : {1, 9}) {
    Rng rng(rows);
    const Case linear(rng, rows, 37, 300, WeightFormat::kBFloat16, stream);
    std::vector<float> y = linear.residual;
    ASSERT_TRUE(Linear({.x = linear.x.data(),
                        .weight = &linear.weight,
                        .residual = y.data(),
                        .y = y.data(),
                        .num_rows = rows,
                        .x_stride = linear.x_stride,
                        .y_stride = linear.y_stride},
                       stream)
                    .ok());
    const std::vector<float> apart = linear.Run(stream, false, true);
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int32_t col = 0; col < 37; ++col) {
        ASSERT_EQ(y[row * linear.y_stride + col], apart[row * linear.y_stride + col]);
      }
    }
  }
}

// Wherever it is in a row, and whatever the inputs are rounded to.
TEST_P(LinearTest, ANanReachesItsRowAlone) {
  CpuStream stream(2);
  for (const WeightFormat format : kFormats) {
    for (const std::int32_t rows : {1, 7, 40}) {
      for (const std::int32_t at : {0, 15, 16, 31, 32, 69}) {
        SCOPED_TRACE("format " + std::to_string(static_cast<int>(format)) + " rows " +
                     std::to_string(rows) + " input " + std::to_string(at));
        Rng rng(at);
        Case linear(rng, rows, 20, 70, format, stream);
        const std::int32_t bad = rows / 2;
        linear.x[bad * linear.x_stride + at] = std::nanf("");
        const std::vector<float> y = linear.Run(stream, false, false);
        for (std::int32_t row = 0; row < rows; ++row) {
          for (std::int32_t out = 0; out < 20; ++out) {
            ASSERT_EQ(std::isnan(y[row * linear.y_stride + out]), row == bad) << "row " << row;
          }
        }
      }
    }
  }
}

TEST_P(LinearTest, NoRowsIsNothing) {
  CpuStream stream(2);
  Rng rng(1);
  const Case linear(rng, 0, 5, 8, WeightFormat::kFloat32, stream);
  EXPECT_TRUE(linear.Run(stream, false, false).empty());
}

TEST_P(LinearTest, EmbeddingGivesRowsAndZerosElsewhere) {
  CpuStream stream(2);
  for (const WeightFormat format : kFormats) {
    Rng rng(3);
    const Case table(rng, 0, 43, 29, format, stream);
    const std::vector<std::int32_t> ids = {99, 100, 142, 143, 0, -1, 117, 100};
    std::vector<float> out(ids.size() * 29, -7.0F);
    ASSERT_TRUE(Embedding({.weight = &table.weight,
                           .ids = ids.data(),
                           .out = out.data(),
                           .num_rows = static_cast<std::int32_t>(ids.size()),
                           .first_row = 100},
                          stream)
                    .ok());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::int32_t row = ids[i] - 100;
      for (std::int32_t k = 0; k < 29; ++k) {
        ASSERT_EQ(out[i * 29 + k], row >= 0 && row < 43 ? table.values[row * 29 + k] : 0.0F);
      }
    }
  }
}

WEFT_FOR_EACH_TARGET(LinearTest);

TEST(PackedMatrixTest, StacksParts) {
  CpuStream stream(2);
  Rng rng(5);
  const Source a(rng, 17, 9, DType::kFloat16);
  const Source b(rng, 1, 9, DType::kFloat32);
  const Source c(rng, 30, 9, DType::kBFloat16);
  const MatrixView parts[] = {a.view, b.view, c.view};
  for (const WeightFormat format : kFormats) {
    const absl::StatusOr<PackedMatrix> packed = PackedMatrix::Pack(parts, format, stream);
    ASSERT_TRUE(packed.ok()) << packed.status();
    EXPECT_EQ(packed->out_features(), 48);
    EXPECT_EQ(packed->in_features(), 9);
    EXPECT_EQ(packed->format(), format);
    std::vector<float> want = a.stored;
    want.insert(want.end(), b.stored.begin(), b.stored.end());
    want.insert(want.end(), c.stored.begin(), c.stored.end());
    for (std::int32_t out = 0; out < 48; ++out) {
      ExpectNear(*packed, out, absl::MakeConstSpan(want).subspan(out * 9, 9));
    }
  }
}

// Groups of zeros, of one value, of values that float16 scales hardly reach.
TEST(PackedMatrixTest, QuantizesEveryGroupByItself) {
  CpuStream stream(1);
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kInt4}) {
    std::vector<float> row(5 * 32 + 3, 0.0F);
    row[40] = -3;
    for (int i = 64; i < 96; ++i) row[i] = static_cast<float>(i - 79) * 1e-3F;
    for (int i = 96; i < 128; ++i) row[i] = static_cast<float>(i - 111) * 1e4F;
    row[162] = 0.25F;
    const MatrixView view = {row.data(), DType::kFloat32, 1, static_cast<std::int32_t>(row.size()),
                             static_cast<std::int64_t>(row.size())};
    const auto packed = PackedMatrix::Pack({&view, 1}, format, stream);
    ASSERT_TRUE(packed.ok()) << packed.status();
    ExpectNear(*packed, 0, row);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(StoredValue(*packed, 0, i), 0.0F);
    EXPECT_NEAR(StoredValue(*packed, 0, 40), -3, 3e-3);
    EXPECT_NEAR(StoredValue(*packed, 0, 162), 0.25, 3e-4);
  }
}

TEST(PackedMatrixTest, RefusesPartsThatDisagree) {
  CpuStream stream(1);
  Rng rng(6);
  const Source a(rng, 3, 4, DType::kFloat32);
  const Source b(rng, 3, 5, DType::kFloat32);
  const MatrixView parts[] = {a.view, b.view};
  EXPECT_EQ(PackedMatrix::Pack(parts, WeightFormat::kFloat32, stream).status().code(),
            absl::StatusCode::kInvalidArgument);
  const Source more_rows(rng, 4, 4, DType::kFloat32);
  for (const MatrixView& up : {b.view, more_rows.view}) {
    EXPECT_EQ(PackedMatrix::PackGated(a.view, up, WeightFormat::kFloat32, stream).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(PackedMatrix::Pack({}, WeightFormat::kFloat32, stream).status().code(),
            absl::StatusCode::kInvalidArgument);
  MatrixView none = a.view;
  none.rows = 0;
  EXPECT_EQ(PackedMatrix::Pack({&none, 1}, WeightFormat::kFloat32, stream).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PackedMatrixTest, NamesTheFirstValueThatCannotBe) {
  CpuStream stream(2);
  struct Bad {
    float value;
    DType source;
    WeightFormat packed;
    const char* says;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Bad bads[] = {
      {std::nanf(""), DType::kFloat32, WeightFormat::kBFloat16, "nan"},
      {std::nanf(""), DType::kBFloat16, WeightFormat::kFloat16, "nan"},
      {kInfinity, DType::kFloat16, WeightFormat::kFloat32, "inf"},
      {-kInfinity, DType::kBFloat16, WeightFormat::kBFloat16, "-inf"},
      {65520.0F, DType::kFloat32, WeightFormat::kFloat16, "does not fit float16"},
      {1e20F, DType::kBFloat16, WeightFormat::kFloat16, "does not fit float16"},
      {3.4e38F, DType::kFloat32, WeightFormat::kBFloat16, "does not fit bfloat16"},
      {std::nanf(""), DType::kFloat32, WeightFormat::kInt8, "nan"},
      {-kInfinity, DType::kBFloat16, WeightFormat::kInt4, "-inf"},
      {8.4e6F, DType::kFloat32, WeightFormat::kInt8, "does not fit int8"},
      {-5.3e5F, DType::kFloat32, WeightFormat::kInt4, "does not fit int4"},
  };
  for (const Bad& bad : bads) {
    Rng rng(7);
    Source a(rng, 50, 33, bad.source);
    Source b(rng, 50, 33, bad.source);
    StoreElement(b.bytes.data() + 1, 40 * b.view.row_stride + 3, bad.source, bad.value);
    StoreElement(b.bytes.data() + 1, 21 * b.view.row_stride + 30, bad.source, bad.value);
    StoreElement(b.bytes.data() + 1, 21 * b.view.row_stride + 31, bad.source, bad.value);
    const MatrixView parts[] = {a.view, b.view};
    for (const absl::Status& status :
         {PackedMatrix::Pack(parts, bad.packed, stream).status(),
          PackedMatrix::PackGated(a.view, b.view, bad.packed, stream).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(status.message().find("row 21, column 30 of part 1"), std::string::npos) << status;
      EXPECT_NE(status.message().find(bad.says), std::string::npos) << status;
    }
  }
  // The largest that rounds to a finite value.
  Rng rng(8);
  Source fits(rng, 2, 2, DType::kFloat32);
  StoreElement(fits.bytes.data() + 1, 0, DType::kFloat32, 65519.0F);
  EXPECT_TRUE(PackedMatrix::Pack({&fits.view, 1}, WeightFormat::kFloat16, stream).ok());
}

}  // namespace
}  // namespace weft::kernels
