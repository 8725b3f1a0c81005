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

// Packs one row; the first column whose value is not finite after rounding, or -1.
template <DType kDType>
std::int32_t PackRow(const Row& source, std::int32_t lane, void* panel) {
  const MatrixView& part = *source.part;
  const auto* row = static_cast<const std::byte*>(part.data) +
                    source.row * part.row_stride * DTypeBytes(part.dtype);
  std::int32_t bad = -1;
  for (std::int32_t col = 0; col < part.cols; ++col) {
    const std::int64_t index = PanelIndex(col, lane, kDType);
    StoreElement(panel, index, kDType, LoadElement(row, col * part.col_stride, part.dtype));
    if (bad < 0 && !std::isfinite(LoadElement(panel, index, kDType))) bad = col;
  }
  return bad;
}

std::int32_t PackRow(const Row& source, std::int32_t lane, DType dtype, void* panel) {
  switch (dtype) {
    case DType::kFloat32:
      return PackRow<DType::kFloat32>(source, lane, panel);
    case DType::kBFloat16:
      return PackRow<DType::kBFloat16>(source, lane, panel);
    case DType::kFloat16:
      return PackRow<DType::kFloat16>(source, lane, panel);
  }
  CheckFailed(__FILE__, __LINE__, "dtype", "unreachable");
}

absl::Status NotFinite(absl::Span<const MatrixView> parts, std::int32_t out, DType dtype) {
  const Row row = FindRow(parts, out);
  for (std::int32_t col = 0;; ++col) {
    const float value =
        LoadElement(row.part->data, row.row * row.part->row_stride + col * row.part->col_stride,
                    row.part->dtype);
    float rounded;
    StoreElement(&rounded, 0, dtype, value);
    if (std::isfinite(LoadElement(&rounded, 0, dtype))) continue;
    return absl::FailedPreconditionError(
        std::isfinite(value)
            ? fmt::format("the value {} at row {}, column {} of part {} does not fit {}", value,
                          row.row, col, row.part_index, DTypeName(dtype))
            : fmt::format("the value at row {}, column {} of part {} is {}", row.row, col,
                          row.part_index, value));
  }
}

}  // namespace

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(absl::Span<const MatrixView> parts, DType dtype,
                                                Stream& stream) {
  ASSIGN_OR_RETURN(const std::int32_t rows, CheckParts(parts));
  PackedMatrix matrix;
  matrix.out_features_ = rows;
  matrix.in_features_ = parts[0].cols;
  matrix.dtype_ = dtype;
  const std::int64_t num_panels = CeilDiv(rows, kPanelWidth);
  const std::int64_t panel_bytes = PanelElements(matrix.in_features_, dtype) * DTypeBytes(dtype);
  ASSIGN_OR_RETURN(matrix.buffer_, Buffer::Allocate(num_panels * panel_bytes));

  std::atomic<std::int32_t> first_bad_row = std::numeric_limits<std::int32_t>::max();
  PoolOf(stream).ParallelFor(num_panels, [&](std::int64_t panel, int /*thread*/) {
    const auto first = static_cast<std::int32_t>(panel * kPanelWidth);
    const std::int32_t lanes = std::min(kPanelWidth, rows - first);
    for (std::int32_t lane = 0; lane < lanes; ++lane) {
      const std::int32_t bad = PackRow(FindRow(parts, first + lane), lane, dtype,
                                       matrix.buffer_.data() + panel * panel_bytes);
      if (bad < 0) continue;
      std::int32_t seen = first_bad_row.load();
      while (first + lane < seen && !first_bad_row.compare_exchange_weak(seen, first + lane)) {
      }
      break;
    }
  });
  if (first_bad_row.load() < rows) return NotFinite(parts, first_bad_row.load(), dtype);
  return matrix;
}

}  // namespace weft::kernels
