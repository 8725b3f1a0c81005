#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fmt/format.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/launch.h"
#include "kernels/cpu/panel.h"
#include "kernels/linear.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft::kernels {
namespace {

absl::StatusOr<std::int32_t> CheckParts(absl::Span<const MatrixView> parts) {
  if (parts.empty()) return absl::InvalidArgumentError("a weight needs at least one part");
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const MatrixView& part = parts[i];
    if (part.rows <= 0 || part.cols <= 0) {
      return absl::InvalidArgumentError(
          fmt::format("part {} is {} x {}; both must be positive", i, part.rows, part.cols));
    }
    if (part.cols != parts[0].cols) {
      return absl::InvalidArgumentError(
          fmt::format("part {} has {} columns, part 0 has {}", i, part.cols, parts[0].cols));
    }
    rows += part.rows;
  }
  if (rows > std::numeric_limits<std::int32_t>::max() - kPanelWidth) {
    return absl::InvalidArgumentError(fmt::format("{} rows are too many", rows));
  }
  return static_cast<std::int32_t>(rows);
}

struct Row {
  const MatrixView* part;
  std::int32_t part_index;
  std::int32_t row;
};

Row FindRow(absl::Span<const MatrixView> parts, std::int32_t row) {
  std::int32_t index = 0;
  while (row >= parts[index].rows) row -= parts[index++].rows;
  return {&parts[index], index, row};
}

float ValueAt(const Row& row, std::int32_t col) {
  return LoadElement(row.part->data, row.row * row.part->row_stride + col * row.part->col_stride,
                     row.part->dtype);
}

// Whether it can be stored.
bool Fits(float value, WeightFormat format) {
  constexpr float kMaxScale = 65504.0F;
  if (format == WeightFormat::kInt8) return std::abs(value) <= 127 * kMaxScale;
  if (format == WeightFormat::kInt4) return std::abs(value) <= 8 * kMaxScale;
  float rounded;
  StoreElement(&rounded, 0, *DTypeOf(format), value);
  return std::isfinite(LoadElement(&rounded, 0, *DTypeOf(format)));
}

// Packs one row: as a lane of a panel, or, of lane kWholeRow, as it is. Returns the first column
// whose value does not fit, or -1.
constexpr std::int32_t kWholeRow = -1;
template <DType kDType>
std::int32_t PackRow(const Row& source, std::int32_t lane, std::byte* panel) {
  std::int32_t bad = -1;
  for (std::int32_t col = 0; col < source.part->cols; ++col) {
    const std::int64_t index = lane == kWholeRow ? col : PanelIndex(col, lane, kDType);
    StoreElement(panel, index, kDType, ValueAt(source, col));
    if (bad < 0 && !std::isfinite(LoadElement(panel, index, kDType))) bad = col;
  }
  return bad;
}

// Of `count` values of a group. The value that is farthest from 0 becomes -8 in int4, which has no
// 8, so that its scale may be negative.
float ScaleOf(const float* values, std::int32_t count, WeightFormat format) {
  float largest = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    if (std::abs(values[i]) > std::abs(largest)) largest = values[i];
  }
  return format == WeightFormat::kInt8 ? std::abs(largest) / 127 : largest / -8;
}

template <WeightFormat kFormat>
std::int32_t PackQuantizedRow(const Row& source, std::int32_t lane, std::byte* panel) {
  constexpr float kLeast = kFormat == WeightFormat::kInt8 ? -127 : -8;
  constexpr float kMost = kFormat == WeightFormat::kInt8 ? 127 : 7;
  const std::int32_t cols = source.part->cols;
  for (std::int32_t first = 0; first < cols; first += kQuantGroup, panel += GroupBytes(kFormat)) {
    const std::int32_t count = std::min(kQuantGroup, cols - first);
    float values[kQuantGroup] = {};
    for (std::int32_t i = 0; i < count; ++i) {
      values[i] = ValueAt(source, first + i);
      if (!Fits(values[i], kFormat)) return first + i;
    }
    StoreElement(panel, lane, DType::kFloat16, ScaleOf(values, count, kFormat));
    const float scale = LoadElement(panel, lane, DType::kFloat16);
    const float inverse = scale == 0 ? 0 : 1 / scale;
    for (std::int32_t i = 0; i < kQuantGroup; ++i) {
      const auto q =
          static_cast<int>(std::nearbyint(std::clamp(values[i] * inverse, kLeast, kMost)));
      std::byte* const values = panel + kScaleBytes;
      if constexpr (kFormat == WeightFormat::kInt8) {
        values[Int8Index(i, lane)] = static_cast<std::byte>(q);
      } else {
        const int shift = Int4Shift(i);
        values[(i / 8 * kPanelWidth + lane) * 4 + shift / 8] |= static_cast<std::byte>(q + 8)
                                                                << shift % 8;
      }
    }
  }
  return -1;
}

std::int32_t PackRow(const Row& source, std::int32_t lane, WeightFormat format, std::byte* panel) {
  switch (format) {
    case WeightFormat::kFloat32:
      return PackRow<DType::kFloat32>(source, lane, panel);
    case WeightFormat::kBFloat16:
      return PackRow<DType::kBFloat16>(source, lane, panel);
    case WeightFormat::kFloat16:
      return PackRow<DType::kFloat16>(source, lane, panel);
    case WeightFormat::kInt8:
      return PackQuantizedRow<WeightFormat::kInt8>(source, lane, panel);
    case WeightFormat::kInt4:
      return PackQuantizedRow<WeightFormat::kInt4>(source, lane, panel);
  }
  CheckFailed(__FILE__, __LINE__, "format", "unreachable");
}

absl::Status DoesNotFit(absl::Span<const MatrixView> parts, std::int32_t out, WeightFormat format) {
  const Row row = FindRow(parts, out);
  for (std::int32_t col = 0;; ++col) {
    const float value = ValueAt(row, col);
    if (Fits(value, format)) continue;
    return absl::FailedPreconditionError(
        std::isfinite(value)
            ? fmt::format("the value {} at row {}, column {} of part {} does not fit {}", value,
                          row.row, col, row.part_index, FormatName(format))
            : fmt::format("the value at row {}, column {} of part {} is {}", row.row, col,
                          row.part_index, value));
  }
}

}  // namespace

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(absl::Span<const MatrixView> parts,
                                                WeightFormat format, Stream& stream) {
  return Pack(parts, /*gated=*/false, format, stream);
}

absl::StatusOr<PackedMatrix> PackedMatrix::PackGated(const MatrixView& gate, const MatrixView& up,
                                                     WeightFormat format, Stream& stream) {
  CHECK(OnDevice(stream) == nullptr);
  if (gate.rows != up.rows) {
    return absl::InvalidArgumentError(
        fmt::format("the gate has {} rows, what it gates {}", gate.rows, up.rows));
  }
  return Pack({gate, up}, /*gated=*/true, format, stream);
}

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(absl::Span<const MatrixView> parts, bool gated,
                                                WeightFormat format, Stream& stream) {
  ASSIGN_OR_RETURN(const std::int32_t rows, CheckParts(parts));
  PackedMatrix matrix;
  matrix.out_features_ = rows;
  matrix.in_features_ = parts[0].cols;
  matrix.format_ = format;
  matrix.gated_ = gated;
  // On a device a weight is [out_features, in_features] as it is; it is made on the host.
  DeviceStream* const device = OnDevice(stream);
  CHECK(device == nullptr || DTypeOf(format).has_value());
  const std::int64_t row_bytes =
      device != nullptr ? std::int64_t{matrix.in_features_} * DTypeBytes(*DTypeOf(format)) : 0;
  const std::int64_t num_panels = NumPanels(matrix);
  const std::int64_t panel_bytes =
      device != nullptr ? kPanelWidth * row_bytes : PanelBytes(matrix.in_features_, format);
  ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(num_panels * panel_bytes));

  std::atomic<std::int32_t> first_bad_row = std::numeric_limits<std::int32_t>::max();
  PoolOf(HostOf(stream)).ParallelFor(num_panels, [&](std::int64_t panel, int /*thread*/) {
    const std::int64_t turns = gated ? 2 : 1;
    const auto part_rows = static_cast<std::int32_t>(rows / turns);
    const auto begin = static_cast<std::int32_t>(panel / turns * kPanelWidth);
    const std::int32_t first = static_cast<std::int32_t>(panel % turns) * part_rows + begin;
    const std::int32_t lanes = std::min(kPanelWidth, part_rows - begin);
    for (std::int32_t lane = 0; lane < lanes; ++lane) {
      std::byte* to = buffer.data() + panel * panel_bytes;
      if (device != nullptr) to += lane * row_bytes;
      const std::int32_t bad =
          PackRow(FindRow(parts, first + lane), device != nullptr ? kWholeRow : lane, format, to);
      if (bad < 0) continue;
      std::int32_t seen = first_bad_row.load();
      while (first + lane < seen && !first_bad_row.compare_exchange_weak(seen, first + lane)) {
      }
      break;
    }
  });
  if (first_bad_row.load() < rows) return DoesNotFit(parts, first_bad_row.load(), format);
  if (device == nullptr) {
    matrix.buffer_ = std::move(buffer);
    return matrix;
  }
  ASSIGN_OR_RETURN(matrix.buffer_, Buffer::Allocate(rows * row_bytes, stream));
  RETURN_IF_ERROR(
      device->CopyToDevice(matrix.buffer_.data(), buffer.data(), matrix.buffer_.size_bytes()));
  RETURN_IF_ERROR(device->Synchronize());
  return matrix;
}

absl::StatusOr<MatrixGroup> MatrixGroup::Create(std::vector<PackedMatrix> matrices,
                                                Stream& stream) {
  MatrixGroup group;
  group.matrices_ = std::move(matrices);
  DeviceStream* const device = OnDevice(stream);
  if (device == nullptr) return group;
  std::vector<const void*> addresses;
  for (const PackedMatrix& matrix : group.matrices_) addresses.push_back(matrix.data());
  const auto bytes = static_cast<std::int64_t>(addresses.size() * sizeof(const void*));
  ASSIGN_OR_RETURN(group.addresses_, Buffer::Allocate(bytes, stream));
  RETURN_IF_ERROR(device->CopyToDevice(group.addresses_.data(), addresses.data(), bytes));
  RETURN_IF_ERROR(device->Synchronize());
  return group;
}

}  // namespace weft::kernels
