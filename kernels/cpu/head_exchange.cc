#include "kernels/head_exchange.h"

#include <algorithm>

#include "kernels/device/device_stream.h"

namespace weft::kernels {
namespace {

// Calls copy(part, row, floats of real heads, offset in parts, offset in heads) for every part of a
// row.
template <typename Copy>
void ForEachPart(const HeadExchangeParams& p, Stream& stream, Copy copy) {
  const std::int64_t head_stride =
      static_cast<std::int64_t>(p.part_begin[p.num_parts]) * p.head_dim;
  const std::int64_t row_stride = static_cast<std::int64_t>(p.padded_heads) * p.head_dim;
  static_cast<CpuStream&>(stream).pool().ParallelFor(p.num_rows, [&](std::int64_t row, int) {
    for (std::int32_t part = 0; part < p.num_parts; ++part) {
      const std::int64_t floats =
          static_cast<std::int64_t>(p.part_begin[part + 1] - p.part_begin[part]) * p.head_dim;
      copy(part * p.part_stride + row * row_stride,
           row * head_stride + static_cast<std::int64_t>(p.part_begin[part]) * p.head_dim, floats,
           row_stride);
    }
  });
}

}  // namespace

absl::Status UnpackHeads(const HeadExchangeParams& params, const float* parts, float* heads,
                         Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream))
    return device->UnpackHeads(params, parts, heads);
  ForEachPart(params, stream,
              [&](std::int64_t at_part, std::int64_t at_head, std::int64_t floats, std::int64_t) {
                std::copy_n(parts + at_part, floats, heads + at_head);
              });
  return absl::OkStatus();
}

absl::Status PackHeads(const HeadExchangeParams& params, const float* heads, float padding,
                       float* parts, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream))
    return device->PackHeads(params, heads, padding, parts);
  ForEachPart(params, stream,
              [&](std::int64_t at_part, std::int64_t at_head, std::int64_t floats,
                  std::int64_t padded_floats) {
                std::copy_n(heads + at_head, floats, parts + at_part);
                std::fill(parts + at_part + floats, parts + at_part + padded_floats, padding);
              });
  return absl::OkStatus();
}

}  // namespace weft::kernels
