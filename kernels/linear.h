#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/dtype.h"

namespace weft::kernels {

// Rows of a weight as a checkpoint stores them.
struct MatrixView {
  const void* data;  // [rows, cols]
  DType dtype;
  std::int32_t rows;            // out features
  std::int32_t cols;            // in features
  std::int64_t row_stride;      // elements from row to row
  std::int64_t col_stride = 1;  // and from column to column
};

// A weight [out_features, in_features], repacked once at load into the order the kernels read it:
// on the CPU panels of 16 outputs that serve one row and many alike, on a device rows as they are.
// Immutable after Pack(). Movable.
class PackedMatrix {
 public:
  PackedMatrix() = default;

  // Stacks `parts` (equal cols) in order, rounds to `format` and packs, in parallel on the host;
  // the result is where kernels of `stream` read, on a device a DType. Rounds to a DType to nearest
  // even; to integers to the nearest multiple of their group's scale, the smallest with which the
  // largest value of the group is in -127..127, or -8..7.
  // INVALID_ARGUMENT if the parts disagree or a dimension is not positive. FAILED_PRECONDITION if a
  // value is NaN or infinite, or too large: the message names row and column of which part.
  static absl::StatusOr<PackedMatrix> Pack(absl::Span<const MatrixView> parts, WeightFormat format,
                                           Stream& stream);

  // Two weights of one shape as one of twice the rows, whose product is gated (LinearParams). On
  // the CPU: `stream` has no device. Errors as of Pack(), whose parts they are, and
  // INVALID_ARGUMENT if their shapes differ.
  static absl::StatusOr<PackedMatrix> PackGated(const MatrixView& gate, const MatrixView& up,
                                                WeightFormat format, Stream& stream);

  std::int32_t out_features() const { return out_features_; }
  // Of a product with it: half as many if it is gated.
  std::int32_t product_features() const { return gated_ ? out_features_ / 2 : out_features_; }
  std::int32_t in_features() const { return in_features_; }
  WeightFormat format() const { return format_; }
  bool gated() const { return gated_; }
  std::int64_t size_bytes() const { return buffer_.size_bytes(); }
  const std::byte* data() const { return buffer_.data(); }

 private:
  static absl::StatusOr<PackedMatrix> Pack(absl::Span<const MatrixView> parts, bool gated,
                                           WeightFormat format, Stream& stream);

  Buffer buffer_;
  std::int32_t out_features_ = 0;
  std::int32_t in_features_ = 0;
  WeightFormat format_ = WeightFormat::kFloat32;
  bool gated_ = false;
};

// Weights of one shape and format whose products run at once: the experts of a layer, or its heads.
// Movable.
class MatrixGroup {
 public:
  MatrixGroup() = default;
  static absl::StatusOr<MatrixGroup> Create(std::vector<PackedMatrix> matrices, Stream& stream);

  std::size_t size() const { return matrices_.size(); }
  bool empty() const { return matrices_.empty(); }
  const PackedMatrix& operator[](std::size_t i) const { return matrices_[i]; }
  const PackedMatrix* begin() const { return matrices_.data(); }
  const PackedMatrix* end() const { return matrices_.data() + matrices_.size(); }
  // Where each one's data() is, in the device's memory; null on the CPU.
  const void* const* addresses() const { return addresses_.as<const void*>(); }

 private:
  std::vector<PackedMatrix> matrices_;
  Buffer addresses_;
};

// y = x W^T (+ bias) (+ residual), fp32 accumulation, of integers within their group before its
// scale. The value of an output does not depend on num_rows, on the other rows, nor on the number
// of threads: each is one fixed order of additions (batching must not change a token, law 2).
// Where RoundsInputs() x is rounded to bfloat16 if the weights are, and to 16-bit integers in
// groups of 32 with a scale if those are integers; else it stays fp32.
//
// Of a gated weight y = silu(x G^T (+ bias)) * (x U^T (+ bias)), silu(x) = x / (1 + exp(-x)): y has
// its product_features(), bias all out_features(), the gate's first; no residual.
struct LinearParams {
  const float* x;  // [num_rows, in_features], x_stride floats from row to row
  const PackedMatrix* weight;
  const float* bias;  // [out_features], or null
  const float*
      residual;  // [num_rows, out_features], y_stride floats from row to row, or null; may be y
  float* y;      // [num_rows, out_features], y_stride floats from row to row
  std::int32_t num_rows;  // >= 0
  std::int64_t x_stride;
  std::int64_t y_stride;
};

absl::Status Linear(const LinearParams& params, Stream& stream);

// Whether this CPU has dot products (device/cpu_target.h) for weights of `format`. Ranks of a group
// must agree: what all of them have, such as experts' scores, each computes for itself.
bool RoundsInputs(WeightFormat format);

// Several independent products at once, their weights of one shape and format: the experts of a
// layer, each with its own rows, or the heads of one, each with its own columns. Each is what
// Linear() makes of it. On the CPU.
absl::Status GroupedLinear(absl::Span<const LinearParams> products, Stream& stream);

// The same of devices in one launch, DeviceStream::GroupedLinear(): of experts with the rows that
// SortByExpert() has given them, how many those are the host does not know, or of heads, each of
// all rows.
struct DeviceGroupedLinearParams {
  const float* x;  // row r of weight w at x + r * x_stride + w * x_group_stride
  const MatrixGroup* weights;
  float* y;               // as x; rows that are no expert's stay as they are
  std::int32_t max_rows;  // of a head, or that may be routed
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int64_t x_group_stride = 0;
  std::int64_t y_group_stride = 0;
  const std::int32_t* row_of = nullptr;        // as SortByExpert()'s; null: row i of y is of row i
  const std::int32_t* expert_begin = nullptr;  // as SortByExpert()'s; null: heads
};

// out[i, :] = row ids[i] - first_row of `weight`, as fp32; zeros where that is outside
// [0, out_features): a vocabulary-parallel embedding sums over ranks.
struct EmbeddingParams {
  const PackedMatrix* weight;  // [vocab rows of this rank, hidden]
  const std::int32_t* ids;     // [num_rows]
  float* out;                  // [num_rows, in_features]
  std::int32_t num_rows;
  std::int32_t first_row;
};

absl::Status Embedding(const EmbeddingParams& params, Stream& stream);

}  // namespace weft::kernels
